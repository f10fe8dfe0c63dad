"""PNG plots of the figures; the only part that needs matplotlib."""

from pathlib import Path
from typing import Any

from figures import Figures

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


def _costs(figures: Figures, path: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(figures.modes), figsize=(6.5 * len(figures.modes), 5), squeeze=False)
    for axis, mode in zip(axes[0], figures.modes, strict=True):
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
        axis.invert_yaxis()
        axis.set_title(f"training time lost per save, {mode}")
        axis.set_xlabel("seconds per GiB")
        axis.legend()
    return _save(figure, path)


def _durable(figures: Figures, path: Path) -> Path:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 5))
    height = 0.8 / len(figures.modes)
    for number, mode in enumerate(figures.modes):
        for row, way in enumerate(figures.ways):
            found = figures.seconds(way, mode, "durable")
            if found:
                error = [[found.median - found.low], [found.high - found.median]]
                place, color = row + number * height, f"C{number}"
                label = str(mode) if row == 0 else None
                axis.barh(place, found.median, height, xerr=error, color=color, ecolor="gray", label=label)
        limit = figures.reference("direct_write_s", mode)
        if limit:
            axis.axvline(limit.median, color=f"C{number}", linestyle="--", label=f"O_DIRECT write, {mode}")
    axis.set_yticks([row + 0.4 - height / 2 for row in range(len(figures.ways))], figures.ways)
    axis.invert_yaxis()
    axis.set_title("until durable")
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
