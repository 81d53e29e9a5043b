"""The benchmark of the catalog's growth runs; its figures are those of the page docs/benchmarks.md."""

import json

from benchmarks.catalog_scale import main


def test_a_small_study_leaves_its_figures_and_its_picture(tmp_path):
    out, work = tmp_path / "out", tmp_path / "work"
    work.mkdir()
    main(sizes=(40, 10), commits=3, opens=1, out=out, work=work)
    points = json.loads((out / "benchmarks" / "catalog_scale.json").read_text())["points"]
    assert [point["episodes"] for point in points] == [10, 40]
    assert all(value > 0 for point in points for value in point.values())
    assert (out / "images" / "catalog_scale.svg").read_text().endswith("</svg>\n")
    assert list(work.iterdir()) == []
