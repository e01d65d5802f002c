"""The supply check: enough ready groups, without a break, for tau seconds (section 4.2 of the paper).

The check has no clock. It asks for a timer when the supply becomes sufficient; a break makes the timer's token stale; only the
current token's firing makes the supply count as held. It is reset after each transition and at each batch start.
"""

from gyre_lib.scheduling.events import SetTimer


class SupplyCheck:
    """Follows one number, the supply in groups, against a threshold."""

    __slots__ = ("_armed", "_held", "_hold_s", "_token")

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._token = 0
        self._armed = False
        self._held = False

    @property
    def held(self) -> bool:
        """The supply has been sufficient for tau without a break."""
        return self._held

    @property
    def armed_timer(self) -> SetTimer | None:
        """The timer that is still awaited, if any (to be set again after a restart)."""
        return SetTimer(self._token, self._hold_s) if self._armed else None

    def observe(self, sufficient: bool) -> SetTimer | None:
        """Take note of the supply now; returns a timer to set where a hold begins."""
        if not sufficient:
            self._armed = self._held = False
            return None
        if self._armed or self._held:
            return None
        if self._hold_s == 0:
            self._held = True
            return None
        self._token += 1
        self._armed = True
        return SetTimer(self._token, self._hold_s)

    def fired(self, token: int) -> None:
        """A timer ran out; stale tokens are ignored."""
        if self._armed and token == self._token:
            self._armed = False
            self._held = True

    def reset(self) -> None:
        """Forget the hold; a timer under way becomes stale."""
        self._armed = self._held = False
