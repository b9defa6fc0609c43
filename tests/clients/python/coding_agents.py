"""Parses the output of the headless coding agents, and interrupts them."""

import json
import signal

PATIENCE = 60  # seconds


def events_of(process):
    """Returns the events that it printed, one JSON object per line."""
    out, err = process.communicate(timeout=PATIENCE)
    events = [json.loads(line) for line in out.splitlines()]
    assert events, out + err
    return events


def outcome(process):
    """Returns the events of an agent that prints `stream-json`, as Claude Code does, and its verdict."""
    events = events_of(process)
    assert events[-1]["type"] == "result", events
    return events, events[-1]


def streamed_words(events):
    """Returns the text of `stream-json`, in the pieces in which it arrived."""
    inner = [event["event"] for event in events if event["type"] == "stream_event"]
    return [event["delta"]["text"] for event in inner if event["type"] == "content_block_delta"]


def tool_results(events):
    """Returns the results of the tools in `stream-json`."""
    parts = [part for event in events if event["type"] == "user" for part in event["message"]["content"]]
    return [part["content"] for part in parts if part["type"] == "tool_result"]


def interrupt(process, stack):
    """Ends an agent in the middle of a stream, and waits for the backend to notice."""
    stack.seen("running")
    process.send_signal(signal.SIGINT)
    stack.seen("left")
