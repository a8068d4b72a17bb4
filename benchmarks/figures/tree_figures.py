"""One real draft tree."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import GREY, INK, METHODS, drawn, finish, load, panels

PAIR = "The shipped pair, GSM8K."


@drawn
def tree_example() -> Figure:
    """Draw one tree with its accepted path."""
    figure, axes = panels([["tree"]], 3.4)
    axis, nodes = axes["tree"], load("trees_example")["nodes"]
    places = _places([node["parent"] for node in nodes])
    for place, node in enumerate(nodes, start=1):
        colour = METHODS["DSpark"] if node["accepted"] else GREY
        (x, y), (above_x, above_y) = places[place], places[node["parent"]]
        axis.plot([above_x, x], [above_y, y], color=colour, linewidth=2.2 if node["accepted"] else 0.9, zorder=1)
    for place, (x, y) in places.items():
        node = {"text": "anchor", "accepted": True, "survival": 1.0} if place == 0 else nodes[place - 1]
        _label(axis, x, y, node)
    lowest = min(y for _, y in places.values())
    axis.set(xlim=(-0.4, max(x for x, _ in places.values()) + 0.5), ylim=(lowest - 0.6, 0.4), xlabel="depth")
    axis.set_yticks([])
    axis.grid(False)
    axis.spines["left"].set_visible(False)
    return finish(
        figure,
        "One real round: a sibling saves what a chain would have lost",
        f"{PAIR} Greedy, 15 nodes. Blue: accepted. Numbers: the predicted probability that the node is accepted.",
    )


def _label(axis: Axes, x: float, y: float, node: dict) -> None:
    colour = METHODS["DSpark"] if node["accepted"] else GREY
    text = node["text"].replace("\n", "\\n").replace(" ", "\u2423")
    box = {"facecolor": "white", "edgecolor": colour, "boxstyle": "round,pad=0.3"}
    axis.annotate(text, (x, y), ha="center", va="center", fontsize=9, color=INK, bbox=box, zorder=2)
    if node["text"] != "anchor":
        number = f"{node['survival']:.2f}".lstrip("0")
        axis.annotate(number, (x, y), (0, -16), textcoords="offset points", fontsize=7.5, ha="center", color=GREY)


def _places(parents: list[int]) -> dict[int, tuple[float, float]]:
    """Return where each node stands: depth to the right, leaves below each other."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents, start=1):
        children.setdefault(parent, []).append(node)
    places, lowest = {}, 0.0

    def put(node: int, depth: int) -> float:
        nonlocal lowest
        if node not in children:
            y, lowest = lowest, lowest - 1.0
        else:
            y = [put(child, depth + 1) for child in children[node]][0]
        places[node] = float(depth), y
        return y

    put(0, 0)
    return dict(sorted(places.items()))
