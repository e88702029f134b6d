"""Objects from a file: the file's neighbours, its errors with their line, and names that are nearly right."""

import pickle

import pytest
from support.problems import problem_of

from grpox.plugins.load_object import load_object


def refused(reference):
    return problem_of(load_object, reference)


def test_a_file_imports_its_neighbours_and_its_classes_pickle(tmp_path):
    (tmp_path / "my_neighbour.py").write_text("VALUE = 7\n")
    (tmp_path / "mine.py").write_text("from my_neighbour import VALUE\nclass Thing:\n    value = VALUE\n")
    thing = load_object("mine.py:Thing", tmp_path)
    assert pickle.loads(pickle.dumps(thing())).value == 7
    assert load_object(f"{tmp_path}/mine.py:Thing") is thing


def test_two_files_of_one_name_stay_apart_and_one_may_take_its_folder_off_the_path(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        remove = f"import sys\nsys.path.remove({str(tmp_path / folder)!r})\n"
        (tmp_path / folder / "same.py").write_text(f"{remove}WHERE = '{folder}'\n")
    assert [load_object(f"{tmp_path}/{f}/same.py:WHERE") for f in "ab"] == ["a", "b"]


@pytest.mark.parametrize(
    ("code", "told", "line"),
    [
        ("x = 1\ny = x / 0\n", "ZeroDivisionError: division by zero", 2),
        ("def f(:\n", "SyntaxError", 1),
        ("import missing_module_xyz\n", "ModuleNotFoundError", 1),
        ("\n\nraise SystemExit(3)\n", "SystemExit: 3", 3),
        ("raise GeneratorExit\n", "GeneratorExit", 1),
    ],
)
def test_a_file_that_raises_is_reported_with_its_line(tmp_path, code, told, line):
    (tmp_path / "bad.py").write_text(code)
    problem = refused(f"{tmp_path}/bad.py:f")
    assert told in problem.what
    assert problem.where == f"{tmp_path}/bad.py:{line}"


def test_slips_in_the_reference(tmp_path):
    (tmp_path / "mine.py").write_text("def reward(): ...\n")
    assert refused(f"{tmp_path}/mine.py:rewrad").nearest == "reward"
    assert refused(f"{tmp_path}/mien.py:reward").nearest == "mine.py"
    assert refused(f"{tmp_path}/mine.py").allowed == "path.py:name"
    assert refused(f"{tmp_path}/mine.txt:reward").what.endswith("is not a .py file")
