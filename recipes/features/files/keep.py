"""A filter of your own: any function of a text. False rejects it, a string takes its place."""


def has_a_docstring(text: str, longest_line: int) -> bool:
    """Keep texts with a docstring and no line longer than `longest_line` characters."""
    return '"""' in text and max(map(len, text.splitlines())) <= longest_line
