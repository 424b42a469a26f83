"""README.md: its numbers are those of outputs/, and what it points at exists."""

import re

from predmoe import paths, readme


def test_the_computed_parts_are_up_to_date():
    text = readme.README.read_text()
    assert text == readme.render(text), "README.md differs from what outputs/ gives: run `predmoe readme`"


def test_every_link_points_at_a_file_of_the_repository():
    links = re.findall(r"\]\(([^)#]+)\)", readme.README.read_text())
    assert links
    missing = [link for link in links if "://" not in link and not (paths.ROOT / link).exists()]
    assert not missing


def test_a_lost_marker_is_an_error_that_names_it():
    import pytest

    with pytest.raises(readme.results.ResultError, match="<!-- benchmarks -->"):
        readme.render(readme.README.read_text().replace("<!-- benchmarks -->", ""))
