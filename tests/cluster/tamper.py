"""A cable on which somebody sits: passes frames between two devices and changes one byte behind a mark, once. Run in the
namespace of the box's switch: tamper.py INNER OUTER MARK (hexadecimal). Prints "ready", and "changed" when it has."""

import ctypes
import fcntl
import select
import socket
import struct
import sys

ETH_P_ALL = 3
SIOCETHTOOL = 0x8946
#: ETHTOOL_STXCSUM, STSO, SGSO, SGRO: whole packets with their checksums, as they would be on a wire.
OFFLOADS = (0x17, 0x1F, 0x24, 0x2C)


def no_offloads(device):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command in OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            # struct ifreq: a name, and a pointer to the value.
            fcntl.ioctl(any_socket, SIOCETHTOOL, struct.pack("16sP16x", device.encode(), ctypes.addressof(value)))


def checksum(data):
    if len(data) % 2:
        data += b"\0"
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def changed(frame, mark):
    """The frame with the byte behind the mark changed and a right TCP checksum; None if it has none."""
    if frame[12:14] != b"\x08\x00" or frame[23] != 6:
        return None
    segment = 14 + (frame[14] & 15) * 4
    end = 14 + struct.unpack("!H", frame[16:18])[0]
    at = frame.find(mark, segment + (frame[segment + 12] >> 4) * 4, end)
    if at < 0 or at + len(mark) >= end:
        return None
    spoilt = bytearray(frame)
    spoilt[at + len(mark)] ^= 1
    spoilt[segment + 16 : segment + 18] = b"\0\0"
    pseudo = bytes(spoilt[26:34]) + struct.pack("!BBH", 0, 6, end - segment)
    spoilt[segment + 16 : segment + 18] = struct.pack("!H", checksum(pseudo + bytes(spoilt[segment:end])))
    return bytes(spoilt)


def main():
    if sys.argv[1] == "--no-offloads":
        return no_offloads(sys.argv[2])
    devices, mark = sys.argv[1:3], bytes.fromhex(sys.argv[3])
    ends = []
    for device in devices:
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        end.bind((device, ETH_P_ALL))
        ends.append(end)
    print("ready", flush=True)
    done = False
    while True:
        for end in select.select(ends, [], [])[0]:
            frame, origin = end.recvfrom(1 << 16)
            if origin[2] == socket.PACKET_OUTGOING:  # sent by ourselves
                continue
            if not done and (spoilt := changed(frame, mark)):
                frame, done = spoilt, True
                print("changed", flush=True)
            ends[1 - ends.index(end)].send(frame)


if __name__ == "__main__":
    main()
