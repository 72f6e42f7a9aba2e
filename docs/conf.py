"""The documentation, from the repository's root: `sphinx-build -W -j 2 -c docs . docs/_build/html`.

The root is Sphinx's source folder, so that the links of a page work in the repository as well, and
those to benchmarks, changelog and README are checked. Python blocks of `docs/` run in the build.
With `-D nb_execution_mode=cache` only pages whose code has changed are run, with `off` none.
Nothing is fetched, and a page needs no network but for the README's badges.
"""

import os
import re
from pathlib import Path

from docutils.nodes import SkipNode
from latex2mathml.converter import convert
from sphinx.errors import ExtensionError
from sphinx.util.inspect import TypeAliasForwardRef

import optax_smile

ROOT = Path(__file__).parents[1]

project, author = "optax_smile", "the authors of optax_smile"
version = release = optax_smile.__version__
extensions = ["myst_nb", "sphinx_copybutton"]
extensions += [f"sphinx.ext.{name}" for name in ("autodoc", "napoleon", "viewcode")]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "benchmarks/README.md", "benchmarks/notes/*.md"]
exclude_patterns = [".*", "docs/_*", "out", "build", "dist", "**/__pycache__"]
nitpicky = True
# Types of others, and of ours those that are no public names.
OURS = r"optax_smile\.(stages\..*|parallel\.(Carry|Function)|_types\.T)"
nitpick_ignore_regex = [("py:.*", rf"(?!optax_smile\b).*|{OURS}")]

# The address of the version that search engines should show, on Read the Docs.
html_baseurl = os.getenv("READTHEDOCS_CANONICAL_URL", "")
html_theme, html_title = "furo", f"{project} {version}"
html_static_path, templates_path = ["_static"], ["_templates"]
html_css_files = ["pages.css"]
html_additional_pages = {"index": "redirect.html"}
html_copy_source = html_show_copyright = False

# What pages run is small. Compiled programs are kept where the tests keep theirs.
compiled = ROOT / ".pytest_cache" / "jax"
for name, value in {
    "JAX_COMPILATION_CACHE_DIR": str(compiled),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PLATFORMS": "cpu",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}.items():
    os.environ.setdefault(name, value)
os.environ.pop("MPLBACKEND", None)  # another one than Jupyter's leaves the pictures out
os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # tqdm, in NumPyro, wants a widget
os.environ["PYTHONPATH"] = f"{ROOT / 'examples'}{os.pathsep}{os.getenv('PYTHONPATH', '')}"
nb_execution_mode, nb_execution_in_temp = "auto", True
nb_execution_timeout, nb_execution_show_tb = 900, True
# Without running a page there is no lexer for its cells.
suppress_warnings = ["myst-nb.lexer"]
nb_output_stderr, nb_merge_streams = "error", True
myst_heading_anchors = 3
myst_enable_extensions, html_math_renderer = ["dollarmath"], "mathml"

python_maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_type_aliases = {"ArrayLike": "ArrayLike", "StepSize": "StepSize"}
# Sphinx 9 writes an alias in a union by its repr.
TypeAliasForwardRef.__repr__ = lambda alias: alias.name
napoleon_use_ivar, napoleon_numpy_docstring = True, False

# Words in stars stay as they are; other stars, bars and the ends of names are no marks.
SIGNS = re.compile(r"(\*\w+\*)|[*|\\]|(?<=\w)_(?!\w)")
PUBLIC = {name: f"optax_smile.{name}" for name in optax_smile.__all__}


# Pages are plain Markdown, which GitHub shows as well; these are the parts that only Sphinx needs.
NOTEBOOK = "---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n"
CELL = re.compile(r"^```python(?: tags=\[(.*)\])?$", re.MULTILINE)
SHOWN = re.compile(r"^```text output\n.*?^```$", re.MULTILINE | re.DOTALL)
HIDDEN = re.compile(r"^<!-- (\{(?:toctree|index)\}.*?)-->$", re.MULTILINE | re.DOTALL)


def to_myst(_app, page, source):
    """Turn Python blocks into cells and comments into directives; drop the outputs of cells."""
    if not page.startswith("docs/"):
        return
    text = HIDDEN.sub(lambda comment: f"```{comment[1].rstrip()}\n```", source[0])
    if CELL.search(text):
        text = NOTEBOOK + CELL.sub(_cell, SHOWN.sub("", text))
    source[0] = text


def _cell(fence):
    tags = f"\n:tags: [{fence[1]}]" if fence[1] else ""
    return f"```{{code-cell}}{tags}"


def to_rest(_app, _what, _name, _object, _options, lines):
    """Write a docstring of this library, plain text with `code` in it, as reStructuredText."""
    lines[:] = "\n".join(_blocks(lines)).split("\n")


def _blocks(lines):
    """Yield text with its marks; examples and formulas stay as they are."""
    text, previous, kind, depth = [], "", "text", 0
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if (kind == "block" and line and indent < depth) or (kind == "example" and not line):
            kind = "text"
        if kind == "text" and line:
            follows = bool(text) and not text[-1]
            is_formula = follows and indent and not previous.startswith(" ")
            if line.lstrip().startswith(">>>"):
                kind = "example"
            elif is_formula or previous.endswith("::"):
                kind, depth = "block", indent
            if kind != "text":
                yield _marked("\n".join(text))
                text = []
            if kind == "block" and not previous.endswith("::"):
                yield ".. code-block:: text\n"
        if kind == "text":
            text.append(":returns:" if line == "Returns:" else line)
        else:
            yield line
        previous = line or previous
    yield _marked("\n".join(text))


def _marked(text):
    """Mark code, link public names, and keep signs that reStructuredText reads as marks."""
    words = re.split(r"`([^`]+)`", text)
    words[::2] = [SIGNS.sub(lambda sign: sign[1] or f"\\{sign[0]}", word) for word in words[::2]]
    words[1::2] = [_code(" ".join(word.split())) for word in words[1::2]]
    return re.sub(
        r"^(Cost|Source):|\b(Differences from the paper):",
        r"**\1\2:**",
        "".join(words),
        flags=re.M,
    )


def _code(word):
    name = PUBLIC.get(word, word)
    is_public = re.fullmatch(r"optax_smile(\.[a-z]\w*)*(\.\w+)", name)
    return f":py:obj:`{word} <{name}>`" if is_public else f"``{word}``"


def is_field(_app, _what, _name, found, skip, _options):
    """Leave out fields of tuples, which the docstring of the class tells."""
    return True if type(found).__name__ == "_tuplegetter" else skip


def formula(display):
    """Write formulas as MathML, which browsers show by themselves."""

    def visit(translator, node):
        translator.body.append(convert(node.astext(), display=display))
        raise SkipNode

    return visit, None


def opens_without_network(app, error):
    """Refuse pages that load a script or style from elsewhere."""
    fetched = re.compile(r'<(script|link)[^>]* (src|href)="(https?:)?//')
    pages = [] if error else Path(app.outdir).rglob("*.html")
    if found := [page.name for page in pages if fetched.search(page.read_text())]:
        raise ExtensionError(f"needs a network: {found}")


def setup(app):
    """Convert pages before MyST reads them, and docstrings before Napoleon does."""
    app.connect("source-read", to_myst)
    app.connect("autodoc-process-docstring", to_rest, priority=400)
    app.connect("autodoc-skip-member", is_field)
    app.add_html_math_renderer("mathml", formula("inline"), formula("block"))
    app.connect("build-finished", opens_without_network)
