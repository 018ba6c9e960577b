"""Numbers and names as text, and lists of them in options."""

from __future__ import annotations

from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.spec.spec import check_class_names


def percent(value: float | None) -> str:
    """An accuracy in per cent."""
    return "-" if value is None else f"{100 * value:.1f} %"


def size(count: float) -> str:
    """Bytes with a unit."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def class_names(text: str) -> list[str]:
    """The class names in ``a, b, c``.

    Raises:
        CommandError: there is no name, or a name occurs twice.
    """
    try:
        return check_class_names([name.strip() for name in text.split(",") if name.strip()])
    except ValueError as error:
        raise CommandError(f"--classes {error}", Exit.BAD_INPUT) from None


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """Parse distinct whole numbers from 0, separated by commas.

    Raises:
        CommandError: the text of ``option`` has another form.
    """
    try:
        numbers = tuple(int(number) for number in text.split(","))
    except ValueError:
        raise CommandError(f"{option} {text!r}: write whole numbers separated by commas", Exit.BAD_INPUT) from None
    if len(set(numbers)) < len(numbers) or min(numbers) < 0:
        raise CommandError(f"{option} {text!r}: the numbers must be different and not below 0", Exit.BAD_INPUT)
    return numbers
