# SPDX-License-Identifier: Apache-2.0
"""The compute driver ``libvirt``: virtual machines of qemu, through libvirt."""
