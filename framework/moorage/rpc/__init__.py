# SPDX-License-Identifier: Apache-2.0
"""Messages between services: the interface of transports, the sender's and the receiver's side."""
