"""PNG plots of the figures; the only part that needs matplotlib."""

from pathlib import Path
from typing import Any

from figures import Figures, Mode

PARTS = {"call": "tab:blue", "gate": "tab:orange", "first step": "tab:red", "other steps": "tab:pink"}


def draw(figures: Figures, folder: Path) -> list[Path]:
    """Write all plots that the figures are enough for; returns their paths."""
    import matplotlib as mpl

    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    if figures.ways:
        drawn += [_costs(figures, folder / "bench-lost.png"), _durable(figures, folder / "bench-durable.png")]
    scaling = figures.results["extras"].get("scaling", {})
    if "ranks" in scaling:
        drawn.append(_scaling(scaling, folder / "bench-scaling.png"))
    return drawn


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return path


def _by_loop(figures: Figures) -> list[list[Mode]]:
    """The modes, a list for each loop."""
    return [
        [mode for mode in figures.modes if mode.training == training]
        for training in dict.fromkeys(mode.training for mode in figures.modes)
    ]


def _costs(figures: Figures, path: Path) -> Path:
    """A row of plots for each loop, a column for each load, with one scale in each row."""
    from matplotlib import pyplot

    loops = _by_loop(figures)
    size = max(map(len, loops)), len(loops)
    figure, axes = pyplot.subplots(
        size[1], size[0], figsize=(4.5 + 3.5 * size[0], 1 + (1.2 + 0.35 * len(figures.ways)) * size[1]),
        squeeze=False, sharey=True, sharex="row",
    )  # fmt: skip
    for row, loop in zip(axes, loops, strict=True):
        for axis, mode in zip(row, loop, strict=False):
            _cost(figures, mode, axis)
    axes[0][0].legend(fontsize="small")
    return _save(figure, path)


def _cost(figures: Figures, mode: Mode, axis: Any) -> None:
    for row, way in enumerate(figures.ways):
        left = 0.0
        for part, color in PARTS.items():
            found = figures.per_gib(way, mode, part)
            width = max(0.0, found.median) if found else 0.0  # a difference, which may be below zero
            axis.barh(row, width, left=left, color=color, label=part if row == 0 else None)
            left += width
        lost = figures.per_gib(way, mode, "lost")
        if lost:
            error = [[lost.median - lost.low], [lost.high - lost.median]]
            axis.errorbar(lost.median, row, xerr=error, fmt="k.", label="lost" if row == 0 else None)
    axis.set_yticks(range(len(figures.ways)), figures.ways)
    axis.set_ylim(len(figures.ways) - 0.5, -0.5)
    axis.set_title(str(mode), fontsize="medium")
    axis.set_xlabel("training time lost per save, s per GiB")


def _durable(figures: Figures, path: Path) -> Path:
    from matplotlib import pyplot

    loops = _by_loop(figures)
    size = 8 * len(loops), 1.5 + 0.6 * len(figures.ways)
    figure, axes = pyplot.subplots(1, len(loops), figsize=size, squeeze=False, sharey=True)
    for axis, loop in zip(axes[0], loops, strict=True):
        height = 0.8 / len(loop)
        for number, mode in enumerate(loop):
            for row, way in enumerate(figures.ways):
                found = figures.seconds(way, mode, "durable")
                if found:
                    error = [[found.median - found.low], [found.high - found.median]]
                    place, label = row + number * height, mode.load if row == 0 else None
                    axis.barh(place, found.median, height, xerr=error, color=f"C{number}", ecolor="gray", label=label)
            limit = figures.reference("direct_write_s", mode)
            if limit:
                axis.axvline(limit.median, color=f"C{number}", linestyle="--")
        axis.set_yticks([row + 0.4 - height / 2 for row in range(len(figures.ways))], figures.ways)
        axis.set_ylim(len(figures.ways) - 0.1, -0.2)
        axis.set_title(f"until durable, {loop[0].training}; dashed: O_DIRECT")
        axis.set_xlabel("seconds")
        axis.legend()
    return _save(figure, path)


def _scaling(scaling: dict[str, Any], path: Path) -> Path:
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for way, found in scaling["sizes"].items():
        if found["points"]:
            sizes, seconds = zip(*found["points"], strict=True)
            left.plot(sizes, seconds, marker="o", label=way)
    left.set(title="training time lost per save", xlabel="GiB", ylabel="seconds", ylim=(0, None), xlim=(0, None))
    if left.has_data():
        left.legend()
    ranks = scaling["ranks"]["throughput_x_direct"]
    right.bar(list(ranks), list(ranks.values()))
    right.axhline(1.0, color="gray", linestyle="--")
    right.set(title="throughput of all ranks on one disk", xlabel="ranks", ylabel="x O_DIRECT write")
    return _save(figure, path)
