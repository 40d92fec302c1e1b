# SPDX-License-Identifier: Apache-2.0
"""Build with pbr; everything that describes the distribution is in setup.cfg."""

import setuptools

setuptools.setup(
    setup_requires=["pbr>=7.0"],
    pbr=True,
    packages=[
        *setuptools.find_packages("framework"),
        *setuptools.find_packages("plugins"),
    ],
)
