"""How configs refuse a value: ValueError naming field, value and remedy."""


def require(holds: bool, name: str, value: object, remedy: str) -> None:
    """Raises ValueError `name = value: remedy` unless `holds`."""
    if not holds:
        raise ValueError(f"{name} = {value!r}: {remedy}")


def require_at_least(least: int, name: str, value: float) -> None:
    """Raises ValueError for a value below `least`."""
    require(value >= least, name, value, f"give at least {least}")
