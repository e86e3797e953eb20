"""Sphinx's configuration of the site. build.py calls Sphinx with a staged copy of the repository's documents (deploy/build-docs.sh)."""
import pathlib

root = pathlib.Path(__file__).resolve().parents[2]
project = "mkernel"
author = "The mkernel authors"
copyright = "The mkernel authors, Apache-2.0"
extensions = ["myst_parser", "breathe"]
root_doc = "deploy/docs/index"
exclude_patterns = []
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
breathe_projects = {"mkernel": str(root / "doxygen/xml")}
breathe_default_project = "mkernel"
breathe_domain_by_extension = {"h": "cpp"}
cpp_id_attributes = ["MK_EXPORT"]
cpp_maximum_signature_line_length = 100
# Names of the standard library and private members have no page.
nitpicky = False
# The type of a constant expression in an attribute is not Sphinx's to know.
suppress_warnings = ["misc.highlighting_failure"]
html_theme = "furo"
html_title = "mkernel"
html_copy_source = False
html_show_sphinx = False
pygments_style = "sphinx"
