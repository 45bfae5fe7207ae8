"""Records every frame of a network device to a file until it is terminated: its length in 4 bytes, then the frame.

Run in a namespace of the test: ``python sniffer.py DEVICE FILE``.
"""

from __future__ import annotations

import socket
import sys

ALL = 0x0003  # ETH_P_ALL: every protocol, both directions
MAX_FRAME = 1 << 17  # segments are only cut into packets after this point, so that frames are large


def main(device: str, path: str) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(ALL)) as line, open(path, "wb", 0) as file:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        line.bind((device, 0))
        print("recording", flush=True)
        while True:
            frame = line.recv(MAX_FRAME)
            file.write(len(frame).to_bytes(4, "big") + frame)


if __name__ == "__main__":
    main(*sys.argv[1:])
