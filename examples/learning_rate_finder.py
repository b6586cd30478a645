"""Find a learning rate by the range test of Smith (arXiv 1506.01186): raise it from step to step until training fails.

    python submit.py examples/vit.yaml run.name=find-lr 'train.callbacks=[examples.learning_rate_finder]'

`train.steps` must be larger than the number of rates. `status` shows the suggested rate, and the report a plot.
"""

from typing import Any

RATES: list[float] = [10.0 ** (5 * index / 79 - 5) for index in range(80)]  # 1e-5 to 1


class RangeTest:
    """The smoothed losses of the steps with the learning rates `RATES`."""

    losses: tuple[float, ...] = ()

    def record(self, loss: float) -> bool:
        """Add the loss of a step. Return True if it is the last one, or four times the lowest one."""
        self.losses += (0.7 * (self.losses or (loss,))[-1] + 0.3 * min(1e9, loss),)  # 1e9 replaces NaN
        return len(self.losses) == len(RATES) or self.losses[-1] > 4 * min(self.losses)

    def suggest(self) -> float:
        """Return a tenth of the rate with the lowest loss, because at this rate the loss no longer falls."""
        return RATES[self.losses.index(min(self.losses))] / 10

    def draw(self) -> bytes:
        """Return an SVG file with the losses, relative to the first one, over the logarithm of the learning rate."""
        heights = (120 * min(loss / self.losses[0], 1.5) for loss in self.losses)
        points = " ".join(f"{7 * index},{200 - height:.0f}" for index, height in enumerate(heights))
        text = f"learning rates from 1e-5 to 1, suggested: {self.suggest():.2g}; lowest loss: {min(self.losses):.3g}"
        svg = f'<text y="240">{text}</text><polyline points="{points}" fill="none" stroke="blue"/>'
        return f'<svg xmlns="http://www.w3.org/2000/svg" width="{7 * len(RATES)}" height="250">{svg}</svg>'.encode()


def callbacks(config: Any) -> list[Any]:
    """Return the callback."""
    from pipeline.train.callback import Callback  # Here, because other scripts import this module without Sluice.

    class LearningRateFinder(RangeTest, Callback):
        is_over = False

        def on_learning_rate(self, trainer: Any, step: int, lr: float) -> float:
            return 0.0 if self.is_over else RATES[len(self.losses)]  # 0: the last step changes no weight.

        def on_step_end(self, trainer: Any, step: int, metrics: dict[str, Any]) -> None:
            if not self.is_over and self.record(metrics["loss"]):
                self.is_over = True
                trainer.add_image("learning_rate", step, self.draw())
                trainer.request_stop(f"the suggested learning rate is {self.suggest():.2g}")

        def state_dict(self) -> dict[str, Any]:
            return vars(self)

        def load_state_dict(self, state: Any) -> None:
            vars(self).update(state)

    return [LearningRateFinder()]
