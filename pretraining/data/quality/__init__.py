"""Filters by recipe: which texts are trained on, and what each rule costs.

punctuation characters that end a sentence, and all others of punctuation
text        a text's lines, paragraphs and sentences
words       its words, and the sequences of them that repeat (needs numpy)
rule        what every rule shares: parameters and verdicts
heuristics  length, Gopher's, C4's and FineWeb's rules
content     language, listed words, personal data, a function of yours
chain       the recipe's rules applied in turn
report      what they took out, with examples

chain = FilterChain.of([{"rule": "gopher_quality"}, {"rule": "pii"}])
kept = chain.apply(texts, wheres)      # None for a text that a rule rejects
print(chain.report.as_text())
"""
