# SPDX-License-Identifier: Apache-2.0
"""Transports: ``local`` (one machine), ``memory`` (one process), ``oslo`` (RabbitMQ and what else oslo.messaging drives)."""
