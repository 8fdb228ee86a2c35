"""Which kernel serves which layer: one for all, or a mix such as "cutlass,model.layers.3.*=triton"."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from p2q.errors import KernelError
from p2q.kernels import DEFAULT_KERNEL, get_kernel


@dataclass(frozen=True)
class KernelChoice:
    """`default`: the kernel of layers that no pattern matches. `patterns`: (pattern, kernel); the first match decides.

    Patterns are those of a shell (`*`, `?`, `[...]`) over a layer's whole name, in vLLM or in the checkpoint.
    """

    default: str
    patterns: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> KernelChoice:
        """Read `KERNEL`, `PATTERN=KERNEL`, or several of them between commas.

        Raises:
            KernelError: an unknown kernel, an empty pattern, or two kernels without a pattern.
        """
        defaults, patterns = [], []
        for entry in text.split(","):
            pattern, equals, kernel = entry.strip().rpartition("=")
            get_kernel(kernel)
            if equals and not pattern:
                raise KernelError("a kernel for an empty pattern", expected="PATTERN=KERNEL", got=repr(entry))
            if equals:
                patterns.append((pattern, kernel))
            else:
                defaults.append(kernel)
        if len(defaults) > 1:
            raise KernelError("two kernels for the same layers", expected="one without a pattern", got=repr(text))
        return cls(defaults[0] if defaults else DEFAULT_KERNEL, tuple(patterns))

    @property
    def kernels(self) -> list[str]:
        """Every kernel that is named, once."""
        return list(dict.fromkeys([self.default, *(kernel for _, kernel in self.patterns)]))

    def pattern_of(self, name: str, shards: list[str]) -> str | None:
        """The pattern that decides for a layer, None where none matches.

        Args:
            name: the layer's name in vLLM.
            shards: the checkpoint's names of the parts of a fused layer.

        Raises:
            KernelError: the parts of a fused layer, which is one product, would get different kernels.
        """
        found = {self._first_match(name, shard) for shard in shards}
        if len({self.kernel_of(pattern) for pattern in found}) > 1:
            raise KernelError(
                "parts of a fused layer with different kernels",
                tensor=name,
                expected=f"one kernel for {', '.join(shards)}",
                got=", ".join(sorted(self.kernel_of(pattern) for pattern in found)),
            )
        return found.pop()

    def kernel_of(self, pattern: str | None) -> str:
        """The kernel of a pattern of `pattern_of`."""
        return self.default if pattern is None else dict(reversed(self.patterns))[pattern]

    def _first_match(self, *names: str) -> str | None:
        return next(
            (pattern for pattern, _ in self.patterns if any(fnmatchcase(name, pattern) for name in names)), None
        )
