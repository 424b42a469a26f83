"""What tests of figures share."""

import matplotlib as mpl

from predmoe import plots


def cut_off(figure) -> list[str]:
    """The visible texts that leave the figure when it is drawn in the report's style."""
    with plots.style():
        figure.draw_without_rendering()
        seen = [ax for ax in figure.axes if ax.get_visible()]
        unseen = {id(label) for ax in seen for axis in (ax.xaxis, ax.yaxis) for label in ticks_outside(axis)}
        hidden = {id(text) for ax in figure.axes if not ax.get_visible() for text in ax.findobj(mpl.text.Text)}
        box = figure.bbox.padded(1.0)
        found = []
        for text in figure.findobj(mpl.text.Text):
            if text.get_text() and text.get_visible() and id(text) not in unseen | hidden:
                extent = text.get_window_extent()
                if not (box.x0 <= extent.x0 and extent.x1 <= box.x1 and box.y0 <= extent.y0 and extent.y1 <= box.y1):
                    found.append(text.get_text())
        return found


def ticks_outside(axis):
    """Labels of ticks beyond the view, which matplotlib makes but does not draw."""
    low, high = sorted(axis.get_view_interval())
    return [label for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high for label in (tick.label1, tick.label2)]
