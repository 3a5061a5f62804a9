"""What a reasoning model thinks, apart from what it answers, while the text comes in."""

from anechain.run.chat import THINK, THINK_END


class Thinking:
    """`inside`: the prompt has opened the thinking. `possible`: the answer itself may begin with it."""

    def __init__(self, inside: bool, possible: bool) -> None:
        self._inside, self._possible = inside, possible and not inside
        self._text = ""
        self._fresh = inside  # nothing but white space came since a tag

    def feed(self, text: str) -> tuple[str, str]:
        """Thought and answer that are certain by now."""
        self._text += text
        if self._possible:
            start = self._text.lstrip()
            if THINK.startswith(start):
                return "", ""
            self._possible = False
            if start.startswith(THINK):
                self._inside = self._fresh = True
                self._text = start.removeprefix(THINK)
        if not self._inside:
            return "", self._answer()
        thought, tag, rest = self._text.partition(THINK_END)
        if tag:
            self._inside, self._text = False, rest
            thought = self._trimmed(thought)
            self._fresh = True
            return thought.rstrip(), self._answer()
        begun = next((n for n in range(len(THINK_END) - 1, 0, -1) if thought.endswith(THINK_END[:n])), 0)
        sure = len(thought[: len(thought) - begun].rstrip())
        self._text = thought[sure:]
        return self._trimmed(thought[:sure]), ""

    def flush(self) -> tuple[str, str]:
        """What was held back, when no more text comes."""
        text, self._text, possible = self._text, "", self._possible
        self._possible = False
        return ("", text) if possible or not self._inside else (self._trimmed(text), "")

    def _answer(self) -> str:
        text, self._text = self._text, ""
        return self._trimmed(text)

    def _trimmed(self, text: str) -> str:
        """Without the white space right after a tag."""
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        return text
