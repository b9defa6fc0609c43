#!/usr/bin/env python3
"""Prints what the compiler and clippy found in our own crates, from `cargo --message-format json`; fails if there is anything."""

import json
import sys


def main():
    rendered = []
    with open(sys.argv[1], encoding="utf-8") as messages:
        for line in messages:
            # Cargo repeats the messages of earlier builds; output of tests is not a message.
            message = json.loads(line) if line.startswith("{") else {}
            if message.get("reason") == "compiler-message" and message["message"]["spans"]:
                rendered.append(message["message"]["rendered"])
    for text in dict.fromkeys(rendered):
        print(text)
    print(f"lint: {len(set(rendered))} findings")
    return 1 if rendered else 0


if __name__ == "__main__":
    sys.exit(main())
