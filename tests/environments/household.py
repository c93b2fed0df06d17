"""A household of two places and three things, written by hand for ALFWorld's rules."""

from __future__ import annotations

PROBLEM = """
(define (problem small)
(:domain alfred)
(:objects
    agent1 - agent
    Desk_bar__plus_01_bar__plus_00 - receptacle
    Drawer_bar__plus_02_bar__plus_00 - receptacle
    loc_bar_1 - location
    loc_bar_2 - location
    loc_bar_3 - location
    DeskType - rtype
    DrawerType - rtype
    BookType - otype
    BowlType - otype
    DeskLampType - otype
    Book_bar__plus_01_bar__plus_01 - object
    Bowl_bar__plus_01_bar__plus_02 - object
    DeskLamp_bar__plus_01_bar__plus_03 - object
)
(:init
    (= (total-cost) 0)
    (receptacleType Desk_bar__plus_01_bar__plus_00 DeskType)
    (receptacleType Drawer_bar__plus_02_bar__plus_00 DrawerType)
    (objectType Book_bar__plus_01_bar__plus_01 BookType)
    (objectType Bowl_bar__plus_01_bar__plus_02 BowlType)
    (objectType DeskLamp_bar__plus_01_bar__plus_03 DeskLampType)
    (canContain DeskType BookType)
    (canContain DeskType BowlType)
    (canContain DrawerType BookType)
    (pickupable Book_bar__plus_01_bar__plus_01)
    (pickupable Bowl_bar__plus_01_bar__plus_02)
    (isReceptacleObject Bowl_bar__plus_01_bar__plus_02)
    (toggleable DeskLamp_bar__plus_01_bar__plus_03)
    (openable Drawer_bar__plus_02_bar__plus_00)
    (atLocation agent1 loc_bar_3)
    (receptacleAtLocation Desk_bar__plus_01_bar__plus_00 loc_bar_1)
    (receptacleAtLocation Drawer_bar__plus_02_bar__plus_00 loc_bar_2)
    (objectAtLocation Book_bar__plus_01_bar__plus_01 loc_bar_1)
    (objectAtLocation Bowl_bar__plus_01_bar__plus_02 loc_bar_1)
    (objectAtLocation DeskLamp_bar__plus_01_bar__plus_03 loc_bar_1)
    (inReceptacle Book_bar__plus_01_bar__plus_01 Desk_bar__plus_01_bar__plus_00)
    (inReceptacle Bowl_bar__plus_01_bar__plus_02 Desk_bar__plus_01_bar__plus_00)
    (inReceptacle DeskLamp_bar__plus_01_bar__plus_03 Desk_bar__plus_01_bar__plus_00)
)
(:goal
    (exists (?r - receptacle ?o - object)
        (and (inReceptacle ?o ?r) (objectType ?o BookType) (receptacleType ?r DrawerType))
    )
)
)
"""
GOAL = "put some book on drawer"
"""The book lies on the desk."""

PLAN = [
    "go to desk 1",
    "take book 1 from desk 1",
    "go to drawer 1",
    "open drawer 1",
    "move book 1 to drawer 1",
]


def row(name: str, task_type: str = "pick_and_place_simple") -> dict[str, object]:
    """A line of a compact file."""
    return {"id": name, "task_type": task_type, "goal": GOAL, "anns": ["File the book."], "pddl_problem": PROBLEM}
