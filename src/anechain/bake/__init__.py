"""How a chain is made. Importing this room silences what coremltools says about itself on every import off the Mac."""

import logging


class _NotAboutItself(logging.Filter):
    """Drops coremltools' notes that Core ML's own libraries are missing, that a library is newer than its tests, and
    that one which no bake uses is of another version than it converts from."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        about_itself = ("has not been tested with coremltools", "is not supported. Minimum required version")
        return not (message.startswith("Failed to load _ML") or any(words in message for words in about_itself))


logging.getLogger("coremltools").addFilter(_NotAboutItself())
