# SPDX-License-Identifier: Apache-2.0
"""The commands of ``moorage``, one module for each thing they are about."""
