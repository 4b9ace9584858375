"""What the demo asks: one real 800-token system prompt, four customers' conversations, many questions. Pure values.

A "customer" fills the slots near the prompt's head, so that each customer's prompts share all but their question, and
different customers share nothing beyond a few blocks: four prefixes to place on the workers, as in a real service.
"""

from __future__ import annotations

from pathlib import Path

PROMPT_FILE = Path(__file__).parent / "prompts" / "support_bot_telecom.md"

QUESTIONS = (
    "My router blinks amber. What should I do first?",
    "When is my bill due?",
    "How much is roaming in zone 2 for a week?",
    "Can you change my plan to the small one?",
    "The internet is slow on my laptop only. Why?",
    "How often may I activate an eSIM?",
    "Someone asked me for my PIN on the phone. Is that you?",
    "What happens after 80 GB?",
    "The light is red. Is it broken?",
    "How long does a line test take?",
    "When can a technician come?",
    "I was charged a late fee. How much is it?",
    "Please refund my last bill.",
    "Which lights mean that everything works?",
    "How do I pay for zone 3?",
    "My QR code is six weeks old. Does it still work?",
    "Is there an outage in my street?",
    "Can I cancel today?",
    "The speed test is slow on the cable too. What now?",
    "Who are you, and what can you do for me?",
)


def system_prompt(customer: str) -> str:
    """The prompt with its slots filled for one customer. Equal names give equal text."""
    text = PROMPT_FILE.read_text(encoding="utf-8")
    filled = {"date": "29 November 2026", "customer_name": customer, "plan": "Home 100", "since": "2021"}
    for slot, value in filled.items():
        text = text.replace("{{" + slot + "}}", value)
    return f"Conversation of {customer}.\n{text}"


def chat_body(model: str, *, customer: str, question: str, max_tokens: int) -> dict[str, object]:
    """One request's body; greedy, so that every arm of the experiment does the same work."""
    messages = [{"role": "system", "content": system_prompt(customer)}, {"role": "user", "content": question}]
    return {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def shared_arm(label: str, *, num_customers: int, num_requests: int) -> list[tuple[str, str]]:
    """(customer, question) pairs in turn over the customers: every customer's prefix comes back again and again."""
    return [
        (f"{label} customer {index % num_customers}", QUESTIONS[index % len(QUESTIONS)])
        for index in range(num_requests)
    ]


def cold_arm(label: str, *, num_requests: int) -> list[tuple[str, str]]:
    """The same questions, but nobody's prompt begins like another's."""
    return [(f"{label} {index} alone", QUESTIONS[index % len(QUESTIONS)]) for index in range(num_requests)]
