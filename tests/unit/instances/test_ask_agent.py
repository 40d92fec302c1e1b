# SPDX-License-Identifier: Apache-2.0
"""Questions of the API to agents: how many requests wait for agents, and what those that cannot be asked are answered."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, cast

from moorage import errors
from moorage.instances.ask_agent import AgentQuestions
from moorage.instances.availability import Availability
from moorage.rpc.client import RpcSender
from tests.servers import wait_until

UUID, HOST = "11111111-1111-4111-8111-111111111111", "rack7-host3"


class Agents:
    """Answers for all hosts, by a function; some hosts are down."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self.answer = answer
        self.down: set[str] = set()
        self.asked: list[tuple[Any, ...]] = []

    def call(self, topic: str, method: str, args: Any, *, server: str, timeout: float) -> Any:
        self.asked.append((topic, method, args, server, timeout))
        return self.answer(server)

    def is_up(self, host: str) -> bool:
        return host not in self.down


class AgentQuestionTests(unittest.TestCase):
    def questions(self, agents: Agents, api_threads: int = 16) -> AgentQuestions:
        return AgentQuestions(cast(RpcSender, agents), cast(Availability, agents), api_threads)

    def refused(self, questions: AgentQuestions, why: str) -> None:
        with self.assertRaisesRegex(errors.Unavailable, why) as refused:
            questions.ask(HOST, "usage_of_instance", UUID, {})
        self.assertNotIn(HOST, f"{refused.exception.message} {refused.exception.details}")

    def asks(self, agents: Agents, count: int) -> Callable[[], bool]:
        return lambda: len(agents.asked) == count

    def test_the_agent_of_the_host_is_asked(self) -> None:
        agents = Agents(lambda host: {"output": host})
        found = self.questions(agents).ask(HOST, "console_of_instance", UUID, {"lines": 5})
        self.assertEqual({"output": HOST}, found)
        asked = ("agent", "console_of_instance", {"instance_uuid": UUID, "lines": 5}, HOST, 15.0)
        self.assertEqual([asked], agents.asked)

    def test_a_quarter_of_the_threads_waits_for_agents(self) -> None:
        awake = Event()
        self.addCleanup(awake.set)
        for api_threads, most in ((16, 4), (3, 1)):
            awake.clear()
            agents = Agents(lambda host: awake.wait(600))
            questions = self.questions(agents, api_threads)
            with ThreadPoolExecutor(most) as pool:
                waiting = [pool.submit(questions.ask, HOST, "usage_of_instance", UUID, {}) for _ in range(most)]
                wait_until(self.asks(agents, most), "the agents are asked")
                self.refused(questions, f"{most} requests of this process wait for agents")
                self.assertEqual(most, len(agents.asked))
                awake.set()
                self.assertEqual([True] * most, [each.result() for each in waiting])
            self.assertTrue(questions.ask(HOST, "usage_of_instance", UUID, {}), "the places are free again")

    def test_an_agent_that_is_down_is_not_asked(self) -> None:
        agents = Agents(lambda host: 1)
        agents.down.add(HOST)
        questions = self.questions(agents, 1)
        for _ in range(2):
            self.refused(questions, f"The agent of instance {UUID} is down")
        self.assertEqual([], agents.asked)
        self.assertEqual(1, questions.ask("another", "usage_of_instance", UUID, {}))

    def test_what_cannot_be_asked_says_why_and_names_no_host(self) -> None:
        def raising(error: errors.MoorageError) -> Callable[[str], Any]:
            def answer(host: str) -> Any:
                raise error

            return answer

        old = errors.NotFound(
            "This service has no method 'usage_of_instance'; it serves: a.", method="usage_of_instance"
        )
        for error, why in (
            (errors.CallTimeout(f"{HOST} has not answered"), "does not answer"),
            (errors.NoListener(f"nobody listens at {HOST}"), "does not answer"),
            (old, "is of an earlier version"),
        ):
            questions = self.questions(Agents(raising(error)), 1)
            for _ in range(2):
                self.refused(questions, why)
        for other in (errors.NotFound("no such instance"), errors.Conflict("it does not run")):
            with self.assertRaises(type(other)) as raised:
                self.questions(Agents(raising(other))).ask(HOST, "usage_of_instance", UUID, {})
            self.assertIs(other, raised.exception)
