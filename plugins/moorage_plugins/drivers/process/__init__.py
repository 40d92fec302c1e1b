# SPDX-License-Identifier: Apache-2.0
"""The compute driver ``process``: a command in a sandbox, watched by a guardian process that survives the agent."""
