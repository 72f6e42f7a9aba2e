"""The progress bar."""

import contextlib

import jax


class Bar(contextlib.AbstractContextManager["Bar"]):
    """A progress bar, if tqdm is installed, which says "compiling" until the first `show`."""

    def __init__(self, total: int, label: str, show: bool):
        self._bar = None
        if show and not jax.process_index():
            with contextlib.suppress(ImportError):
                from tqdm.auto import tqdm

                self._bar = tqdm(total=total, desc=label)
                self._bar.set_postfix_str("compiling")

    def show(self, done: int, **figures: object):
        """Set the amount of work done, and show some figures."""
        if self._bar is not None:
            self._bar.set_postfix(figures, refresh=not done)
            self._bar.total = max(self._bar.total, done)
            self._bar.update(done - self._bar.n)

    def end(self, why: str):
        """Say why the work ends before all of it is done."""
        if self._bar is not None:
            self._bar.total = self._bar.n
            self._bar.set_postfix_str(f"{self._bar.postfix}, {why}")

    def __exit__(self, *_: object):
        if self._bar is not None:
            self._bar.close()
