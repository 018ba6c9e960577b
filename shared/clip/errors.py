"""The one exception of the frozen backbone layer."""


class BackboneError(ValueError):
    """A backbone cannot be loaded, or cannot do what it was asked; the message names what is wrong and what to do."""
