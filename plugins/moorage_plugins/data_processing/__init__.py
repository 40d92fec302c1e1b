# SPDX-License-Identifier: Apache-2.0
"""Data processing, the smallest real service that periodic tasks can act on: clusters, jobs that are processes, proxy users.

A cluster is a folder on the machine of the agent that has it. A job is a process in that folder, and a proxy user a credential
that a job has while it runs. Agents do the work (:mod:`.operations`); periodic tasks look, flip states and ask (:mod:`.tasks`).
"""
