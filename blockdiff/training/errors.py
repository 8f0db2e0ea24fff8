"""Why a run ends before its last step, other than by a signal. Imports nothing."""


class TrainingError(Exception):
    """The run cannot go on: the message says what happened, what is left and what to do."""


class NonFiniteError(TrainingError):
    """The loss or the weights are not finite."""


class CheckpointWriteError(TrainingError):
    """A checkpoint could not be written; the former ones are untouched."""
