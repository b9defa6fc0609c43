#!/usr/bin/env python3
"""Converts a Mooncake trace to the form that the replay reads. Usage: convert.py TRACE.jsonl.gz NAME.csv.gz

Blocks are hashed with everything before them, so the same block always follows the same blocks, and blocks are numbered
in the order of their first appearance. One number therefore describes all blocks of a request: the last one that an
earlier request had too. All others are new.
"""
import gzip
import json
import sys


def convert(lines):
    parents, time = {}, 0
    yield "milliseconds_since_previous,input_tokens,output_tokens,last_known_block"
    for line in lines:
        request = json.loads(line)
        blocks, known, parent = request["hash_ids"], "", None
        for block in blocks:
            if block in parents:
                assert parents[block] == parent, f"block {block} has two predecessors"
                known = block
            else:
                assert block == len(parents), f"block {block} is not the next number"
                parents[block] = parent
            parent = block
        assert len(blocks) == -(-request["input_length"] // 512)
        yield f'{request["timestamp"] - time},{request["input_length"]},{request["output_length"]},{known}'
        time = request["timestamp"]


if __name__ == "__main__":
    with gzip.open(sys.argv[1], "rt") as trace, open(sys.argv[2], "wb") as converted:
        text = "".join(f"{row}\n" for row in convert(trace))
        converted.write(gzip.compress(text.encode(), compresslevel=9, mtime=0))
