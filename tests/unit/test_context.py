# SPDX-License-Identifier: Apache-2.0
"""What an operation keeps of its request."""

from __future__ import annotations

import threading
import unittest

from hypothesis import given
from hypothesis import strategies as st
from oslo_context import context as oslo_context

from moorage.context import RequestContext, from_dict, from_text, to_text, trace_parent
from moorage.work.tables import workers

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=60)


class KeptRequestTests(unittest.TestCase):
    @given(TEXT, TEXT, TEXT)
    def test_what_is_kept_comes_back(self, user: str, project: str, given_id: str) -> None:
        asked = RequestContext(
            user_id=user, project_id=project, request_id="req-1", global_request_id=given_id, roles=["admin"],
            traceparent=PARENT, overwrite=False,
        )  # fmt: skip
        kept = from_text(to_text(asked))
        assert kept is not None
        for name in ("user_id", "project_id", "request_id", "global_request_id", "traceparent"):
            self.assertEqual(getattr(asked, name) or None, getattr(kept, name), name)
        self.assertEqual([], kept.roles)

    @given(st.text(st.characters(exclude_categories=["Cs"]), max_size=400))
    def test_it_fits_into_its_column(self, text: str) -> None:
        asked = RequestContext(
            user_id=text, project_id=text, request_id="req-" + text, global_request_id=text, traceparent=PARENT,
            overwrite=False,
        )  # fmt: skip
        self.assertLessEqual(len(to_text(asked) or ""), getattr(workers.c.request.type, "length", 0))

    def test_work_of_services_has_no_request(self) -> None:
        for context in (None, from_dict({})):
            self.assertIsNone(to_text(context))
        self.assertIsNone(from_text(None))

    def test_reading_of_a_request_does_not_make_it_that_of_the_thread(self) -> None:
        found: list[object] = []

        def read() -> None:
            from_text('{"request_id":"req-1","user":"alice"}')
            from_dict({"request_id": "req-2"})
            RequestContext(request_id="req-3", overwrite=False)
            found.append(oslo_context.get_current())

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        self.assertEqual([None], found)

    def test_messages_carry_the_trace_and_when_the_request_was_received(self) -> None:
        sent = RequestContext(request_id="req-1", traceparent=PARENT, received_at=5, overwrite=False)
        got = from_dict(sent.to_dict())
        self.assertEqual((PARENT, 5), (got.traceparent, got.received_at))
        # A service of an older release sends neither.
        old = from_dict({"request_id": "req-1", "user": "alice"})
        self.assertEqual((None, 0), (old.traceparent, old.received_at))

    def test_messages_are_read_as_oslo_context_reads_them(self) -> None:
        sent = RequestContext(
            user_id="u", project_id="p", domain_id="d", user_domain_id="ud", project_domain_id="pd", is_admin=True,
            read_only=True, show_deleted=True, auth_token="t", request_id="req-1", global_request_id="req-0",
            resource_uuid="r", roles=["a", "b"], is_admin_project=False, system_scope="all", traceparent=PARENT,
            received_at=7, overwrite=False,
        ).to_dict()  # fmt: skip
        names = {"user_name": "un", "project_name": "pn", "domain_name": "dn", "user_domain_name": "udn",
                 "project_domain_name": "pdn"}  # fmt: skip
        for values in (sent, sent | names, {"request_id": "req-2"}, {"request_id": "req-3", "user": "u", "more": 1}):
            with self.subTest(values):
                expected = RequestContext.from_dict(dict(values), overwrite=False)
                self.assertEqual(vars(expected), vars(from_dict(values)))
        self.assertIsNone(from_dict({"user": "u"}).request_id)

    def test_only_a_well_formed_trace_parent_is_passed_on(self) -> None:
        self.assertEqual(PARENT, trace_parent(PARENT))
        for wrong in (
            None, "", PARENT.upper(), PARENT + "-x", PARENT.replace("00-4", "ff-4"), f"00-{'0' * 32}-{'1' * 16}-01",
            f"00-{'1' * 32}-{'0' * 16}-01", "x" * 10_000,
        ):  # fmt: skip
            self.assertIsNone(trace_parent(wrong))


if __name__ == "__main__":
    unittest.main()
