"""A pool of rows that are packed on demand: the lookahead of streaming packing."""

from dataclasses import dataclass, field

from gyre_lib.training.bin_packing import best_fit_decreasing
from gyre_lib.training.micro_steps import PlacedRow


@dataclass(frozen=True, slots=True)
class PoolItem:
    """Rows that must share one microbatch."""

    rows: tuple[PlacedRow, ...]
    tokens: int


@dataclass
class PackingPool:
    """Items waiting to be packed into microbatches of `capacity` tokens."""

    capacity: int
    items: list[PoolItem] = field(default_factory=list)
    tokens: int = 0

    def add(self, item: PoolItem) -> None:
        self.items.append(item)
        self.tokens += item.tokens

    def take(self, bins: int, room: tuple[int, ...] = ()) -> list[list[PoolItem]]:
        """Remove and return the contents of at most `bins` microbatches, after first filling the free space `room` of others.

        The whole pool is packed anew each time and the fullest bins leave, fullest first: what packs badly waits for better company.
        """
        packed = best_fit_decreasing([item.tokens for item in self.items], self.capacity, room)
        filled, fresh = packed[: len(room)], packed[len(room) :]
        fresh.sort(key=lambda numbers: sum(self.items[number].tokens for number in numbers), reverse=True)
        chosen = filled + fresh[:bins]
        contents = [[self.items[number] for number in numbers] for numbers in chosen]
        gone = {number for numbers in chosen for number in numbers}
        self.items = [item for number, item in enumerate(self.items) if number not in gone]
        self.tokens -= sum(item.tokens for items in contents for item in items)
        return contents

    def take_all(self) -> list[list[PoolItem]]:
        """Remove everything, packed at once."""
        return self.take(len(self.items))
