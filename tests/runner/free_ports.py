#!/usr/bin/env python3
"""free_ports.py [<count>]: TCP ports on this host that nothing listens at, for programs that take a number and no socket. They lie
below those that the kernel gives to a program that asks for any: of tests that run beside each other none gets one by chance."""
import random
import socket
import sys


def free_ports(count=1, host="127.0.0.1"):
    held = []
    try:
        while len(held) < count:
            one = socket.socket()
            try:
                one.bind((host, random.randrange(20000, 32000)))
            except OSError:
                one.close()
                continue
            held.append(one)
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


if __name__ == "__main__":
    print(*free_ports(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
