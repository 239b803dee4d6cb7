"""Bytes of HBM that an instruction of an optimised HLO program reads and writes.

What the compiler keeps in VMEM (a memory space in its layout) moves no byte of HBM. Of a stack of
layers that one turn of a loop slices or updates in place, only the slice moves: counting the stack
would charge every turn with all layers.
"""

from __future__ import annotations

from train.compile.hlo import ARRAY, Computation, Executed, Instruction, Program, shape_bytes

_SLICING = ("dynamic-slice", "slice", "gather")
_HOST = "S(5)"
_VIEWS = ("bitcast", "reshape", "get-tuple-element")


def host_bytes(instruction: Instruction) -> int:
    """Bytes that work copies between HBM and the host's memory, 0 if that is not what it does. A
    slice of a stack on the host, or an update of it, moves the slice alone where it is
    asynchronous, which names both."""
    if _HOST not in instruction.shape:
        return 0
    arrays = [match[0] for match in ARRAY.finditer(instruction.shape)]
    in_hbm = [array for array in arrays if _HOST not in array]
    return max(shape_bytes(array) for array in in_hbm or arrays)


def hbm_bytes(program: Program, executed: Executed) -> int:
    """Bytes read and written, once."""
    instruction, known = executed.instruction, executed.computation.instructions
    shapes = [known[name].shape for name in instruction.operands if name in known]
    if instruction.opcode == "fusion":
        (name,) = instruction.called
        return _fusion_bytes(program.computations[name], shapes, instruction.shape)
    result = _in_hbm(instruction.shape)
    if instruction.opcode in _SLICING:
        read = min(_in_hbm(shapes[0]), shape_bytes(instruction.shape))
        return read + sum(map(_in_hbm, shapes[1:])) + result
    if instruction.opcode == "dynamic-update-slice":
        update = shape_bytes(shapes[1])
        return _in_hbm(shapes[1]) + min(result, update)
    if instruction.opcode in ("copy-start", "slice-start"):
        # The result is (destination, source, context).
        destination = instruction.shape.lstrip("(").split("}", 1)[0] + "}"
        size = shape_bytes(destination)
        return min(size, _in_hbm(destination)) + min(size, sum(map(_in_hbm, shapes)))
    return sum(map(_in_hbm, shapes)) + result


def _in_hbm(shape: str) -> int:
    return shape_bytes(shape, only_hbm=True)


def _fusion_bytes(inside: Computation, shapes: list[str], result: str) -> int:
    users: dict[str, list[Instruction]] = {}
    for instruction in inside.instructions.values():
        for name in instruction.operands:
            users.setdefault(name, []).append(instruction)
    total = 0
    for instruction in inside.instructions.values():
        if instruction.opcode == "parameter":
            index = int(instruction.rest.split(")", 1)[0])
            if index < len(shapes):
                total += min(_in_hbm(shapes[index]), _read(instruction, users))
    return total + min(_in_hbm(result), _written(inside, result))


def _read(source: Instruction, users: dict[str, list[Instruction]]) -> int:
    """Bytes of a parameter that the fusion reads: slices alone, if nothing else is done to it."""
    total = 0
    for user in users.get(source.name, ()):
        is_first = user.operands[:1] == [source.name]
        if user.opcode in _SLICING and is_first:
            total += shape_bytes(user.shape)
        elif user.opcode in _VIEWS:
            total += _read(user, users)
        elif not (user.opcode == "dynamic-update-slice" and is_first):  # that one writes in place
            return shape_bytes(source.shape)
    return total


def _written(inside: Computation, result: str) -> int:
    """Bytes of a fusion's results that it writes: updates alone, where they are made in place."""
    (root,) = [each for each in inside.instructions.values() if each.is_root] or [None]
    if root is None:
        return shape_bytes(result)
    names = root.operands if root.opcode == "tuple" else [root.name]
    total = 0
    for name in names:
        made = inside.instructions[name]
        while made.opcode in _VIEWS and made.operands[0] in inside.instructions:
            made = inside.instructions[made.operands[0]]
        if made.opcode == "dynamic-update-slice":
            made = inside.instructions[made.operands[1]]
        total += shape_bytes(made.shape)
    return total
