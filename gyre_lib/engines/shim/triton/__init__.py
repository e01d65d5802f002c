"""Triton, absent: kernels are decorated at import and never launched. The two size calculations are called on CPU as well."""

from absent_package import declare_absent


def cdiv(numerator: int, denominator: int) -> int:
    """Integer division rounded up."""
    return (numerator + denominator - 1) // denominator


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is at least `value` (1 for values below 1)."""
    return 1 if value < 1 else 1 << (value - 1).bit_length()


declare_absent("triton", "3.9.0", cdiv=cdiv, next_power_of_2=next_power_of_2)
