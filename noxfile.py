"""The checks of `.ci/run`, each in an environment of its own: `nox -s lint types`, `nox -s tests-3.12 -- tests/passes`.

On Python 3.13 the tests run beside plain onnxruntime, on the others beside onnxruntime-training-cpu (docs/install.md).
"""

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "tests", "docs"]

PROJECT = nox.project.load_toml("pyproject.toml")["project"]
VERSIONS = ["3.10", "3.11", "3.12", "3.13"]


def requirements(*names: str) -> list[str]:
    """List what the test extra asks for of these tools, so that all that run them have the same versions."""
    extra = PROJECT["optional-dependencies"]["test"]
    return [line for line in extra if line.startswith(names)]


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, docstrings, format, and the layers of the packages."""
    session.install(*requirements("ruff", "import-linter"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("lint-imports", env={"PYTHONPATH": "."})


@nox.session
def types(session: nox.Session) -> None:
    """Run mypy, with the types of what the package is built on."""
    session.install(".[test]")
    session.run("mypy")


@nox.session(python=VERSIONS)
def tests(session: nox.Session) -> None:
    """Run all tests on all processors, or those that are named."""
    session.install(".[test]")
    session.run("pytest", "-q", "-rs", *(session.posargs or ["-n", "auto", "--dist", "loadfile"]))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation as a site; a dead link is an error."""
    session.install(".[docs]")
    quiet = {"NO_MKDOCS_2_WARNING": "1"}  # of a version to come
    session.run("mkdocs", "build", "--strict", "--site-dir", session.create_tmp(), env=quiet)


@nox.session
def coverage(session: nox.Session) -> None:
    """Measure how much of the package the tests run: those that need torch too, on all processors."""
    session.install(".[test,docs,bench]")
    session.run("pytest", "-q", "-rs", "-n", "auto", "--dist", "loadfile", "--cov", "--cov-report=")
    session.run("coverage", "report", "--sort=cover", "--skip-covered")
