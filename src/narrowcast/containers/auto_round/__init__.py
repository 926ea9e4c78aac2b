"""The auto-round container, which Intel's auto-round writes and vLLM and transformers load."""

from narrowcast.containers.auto_round.config import BESIDE, NAME, document
from narrowcast.containers.auto_round.read import claims, read
from narrowcast.containers.auto_round.spellings import spelling
from narrowcast.containers.container import Container

CONTAINER = Container(
    name=NAME,
    title="auto-round",
    claims=claims,
    read=read,
    spelling=spelling,
    document=document,
    files=(BESIDE,),
)
