"""Text that leaves only when it is certain not to begin a stop string."""

from collections.abc import Sequence


class Held:
    """A stream of text and the strings that end it. `feed` and `flush` give what may be shown."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._text = ""
        self.stopped = False  # a stop string came; it and what follows are never shown
        self.shown = 0  # characters

    @property
    def pending(self) -> str:
        """What is held back."""
        return self._text

    def feed(self, text: str) -> str:
        """Adds `text`. The leftmost stop string counts; of several at one place all end in the same way."""
        self._text += text
        places = [place for stop in self._stops if (place := self._text.find(stop)) >= 0]
        if places:
            self.stopped = True
            return self._show(min(places))
        longest = max((self._begun(stop) for stop in self._stops), default=0)
        return self._show(len(self._text) - longest)

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        return "" if self.stopped else self._show(len(self._text))

    def _begun(self, stop: str) -> int:
        """How many characters at the end may be the beginning of `stop`."""
        for length in range(min(len(stop) - 1, len(self._text)), 0, -1):
            if self._text.endswith(stop[:length]):
                return length
        return 0

    def _show(self, count: int) -> str:
        shown, self._text = self._text[:count], self._text[count:]
        self.shown += count
        return shown
