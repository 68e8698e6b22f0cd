import torch


def body(rank, world_size, root):
    from ddp_nanguard.dump import write_dump
    from ddp_nanguard.pieces import Piece
    from tests.dump_requests import request

    w = torch.ones(3) if rank == 0 else torch.full((3,), float("nan"))
    r = request(
        root,
        rank=rank,
        world_size=world_size,
        state=[Piece.whole("model.w", w), Piece.whole("model.e", torch.zeros(2))],
    )
    return write_dump(r)
