"""How a chain is made. Importing this room silences what coremltools says about itself on every import off the Mac."""

import logging


class _NotAboutItself(logging.Filter):
    """Drops coremltools' notes that Core ML's own libraries are missing and that a library is newer than its tests."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not (message.startswith("Failed to load _ML") or "has not been tested with coremltools" in message)


logging.getLogger("coremltools").addFilter(_NotAboutItself())
