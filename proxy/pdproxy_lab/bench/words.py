"""Frequent English words: with a blank before it, each is one token of most vocabularies. Data
only.
"""

_TEXT = """
the of and to in is was for that on with as by at from his it an are were which this be or had not
have one but their has its new first also after they two her she been other when time there more
than most some would into who only over many then these made can all out him between about may
during where such being world part under well while both year could through used life them people
before city down work long state known day another became second found each number because same name
so main early group high public last end back house place large right small water school case family
point line since home form service power book court land side area head night road body team story
game season order party war air music film river north south east west age king church island
century law field son death control force system general report white black red green blue set play
four three five six seven eight nine ten great good old young short full free local human common
single total real true clear hard soft light dark cold warm fast slow open close left center front
level art data market trade price value cost bank office board member leader student teacher doctor
worker player driver writer paper letter page word language voice sound image picture color size
shape weight speed heat energy space earth sun moon star sea tree plant animal bird fish dog horse
food meat fruit bread milk sugar salt glass stone wood iron gold silver oil gas fire rain snow wind
storm summer winter spring month week hour minute morning evening today street bridge town village
station train ship car plane engine machine tool door window wall floor room table chair bed box bag
key card ball ring clock camera
"""
WORDS = tuple(_TEXT.split())
