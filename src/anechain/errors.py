"""The five ways in which anechain refuses. Each message is one sentence: what, where, what to do."""


class AnechainError(Exception):
    """Base of every refusal; the command line prints its message on one line and exits with 2."""


class SourceError(AnechainError):
    """The checkpoint cannot be read, or says something that is not understood."""


class RecipeError(AnechainError):
    """The recipe cannot be read, or cannot be applied to this model."""


class BundleError(AnechainError):
    """The bundle is incomplete, damaged, or not what its manifest says."""


class EngineError(AnechainError):
    """The engine is not there, or cannot run this program."""


class RequestError(AnechainError):
    """What was asked cannot be done: a prompt longer than the context, an unknown option value."""
