# SPDX-License-Identifier: Apache-2.0
"""How the documentation is built: ``make docs``."""

import importlib.metadata
import sys
from pathlib import Path

project = "Moorage"
copyright = "the Moorage contributors"
version = release = importlib.metadata.version("moorage")

sys.path.insert(0, str(Path(__file__).parent / "ext"))
extensions = [
    "public_interface",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "oslo_config.sphinxext",
    "oslo_policy.sphinxext",
    "reno.sphinxext",
    "manual",
    "rest",
]

html_theme = "alabaster"
html_theme_options = {"description": "A plugin framework for the control planes of fleets"}

# Members in the order of the source: the author's order is part of the explanation.
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_default_options = {"members": True, "show-inheritance": True}
# Plugins for servers whose libraries are not installed are documented all the same.
autodoc_mock_imports = []

# `make man`: the pages of section 1 and 8, each from its program's own parsers.
man_pages = [
    ("man/moorage", "moorage", "the control plane of a fleet", [], 1),
    ("man/moorage-manage", "moorage-manage", "manage the database and the users of a control plane", [], 8),
    ("man/moorage-status", "moorage-status", "look for what stands in the way of an upgrade", [], 8),
]
