"""The errors megamoe raises. Every message names what was got, what is allowed and the fix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megamoe.protocol import Reason


class MegaMoEError(Exception):
    """Base of all errors raised by megamoe.

    Args:
        message: what was got and what is allowed.
        hint: the fix, usually a command or an argument; appended to the message.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message} Fix: {hint}" if hint else message)

    def __reduce__(self) -> tuple[Any, ...]:
        # Python would call the class with the finished text. Engines send the errors of their workers from process to process.
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[MegaMoEError], arguments: tuple[object, ...], attributes: Mapping[str, object]) -> MegaMoEError:
    error = kind.__new__(kind)
    error.args = arguments
    error.__dict__.update(attributes)
    return error


class BackendNotFound(MegaMoEError):
    """No installed distribution offers a backend of this name."""


class BackendUnavailable(MegaMoEError):
    """The backend is installed but cannot run here: no such GPU, no driver, no kernel yet, or disabled."""


class BackendIncompatible(MegaMoEError):
    """The backend's protocol version or requirements do not match what is installed."""


class BackendBroken(MegaMoEError):
    """Loading the backend raised. The original exception is the ``__cause__``."""


class BackendAmbiguous(MegaMoEError):
    """Two distributions offer this name, or two backends fit the device equally well."""


class UnsupportedProblem(MegaMoEError):
    """A backend cannot compute this problem.

    Attributes:
        reasons: every reason, not only the first; each carries its own hint.
    """

    def __init__(self, reasons: Sequence[Reason], *, subject: str = "This problem is not supported") -> None:
        self.reasons = tuple(reasons)
        super().__init__(f"{subject}: " + " ".join(f"({i}) {reason}" for i, reason in enumerate(self.reasons, 1)))


class InvalidInput(MegaMoEError, ValueError):
    """An argument has a wrong value, shape, dtype, device or stride. Raised before any collective or launch."""


class SessionClosed(MegaMoEError, RuntimeError):
    """A session, layer or packed weight was used after it was closed."""


class RankMismatch(MegaMoEError):
    """The ranks of a session disagree on something that must be equal. Raised on every rank."""


class PeerTimeout(MegaMoEError, TimeoutError):
    """A wait inside a kernel passed its deadline.

    Attributes:
        rank: the rank that was waited for.
        site: the name of the wait.
        expected: the value waited for.
        seen: the last value read.
    """

    def __init__(self, message: str, *, rank: int, site: str, expected: int, seen: int, hint: str | None = None) -> None:
        self.rank, self.site, self.expected, self.seen = rank, site, expected, seen
        super().__init__(f"{message} (rank {rank}, wait site {site!r}, expected {expected}, seen {seen}).", hint=hint)


class PeerAborted(MegaMoEError):
    """A peer left the session: it died, rejected its input, or reported a timeout.

    Attributes:
        rank: the rank that aborted; -1 when the collective library did not say which one was lost.
    """

    def __init__(self, message: str, *, rank: int, hint: str | None = None) -> None:
        self.rank = rank
        super().__init__(f"{message} (rank {rank}).", hint=hint)


class DropError(MegaMoEError):
    """A kernel drop could not be taken in, proved or given back; nothing was changed on disk."""


class EmulationError(MegaMoEError):
    """Blackwell code cannot be emulated here: no tool, no such instruction, or text that is not PTX."""


class UnsupportedInstruction(EmulationError):
    """The emulation has no replacement for an instruction. Raised before anything is launched.

    Attributes:
        instruction: as written.
        line: its 1-based line in the PTX.
    """

    def __init__(self, instruction: str, line: int, reason: str) -> None:
        self.instruction, self.line = instruction, line
        super().__init__(
            f"Line {line} of the PTX cannot be emulated: {instruction} ({reason}).",
            hint="the table of docs/emulation.md lists what can; use one of those forms or test this kernel on its real GPU",
        )


class EmulationFault(EmulationError):
    """An emulated kernel did what the real architecture forbids or leaves undefined, or waited past its deadline.

    Attributes:
        code: name of the check that failed.
        line: 1-based line of the instruction in the kernel's PTX; 0 when it is not about one instruction.
    """

    def __init__(self, message: str, *, code: str, line: int) -> None:
        self.code, self.line = code, line
        super().__init__(message)
