"""Filters by recipe: which texts are trained on, and what each rule costs.

text        a text's lines, paragraphs, sentences and words, and what repeats in it (needs numpy)
rule        what every rule shares: parameters and verdicts
heuristics  length, Gopher's, C4's and FineWeb's rules
classifier  good texts and others, and how it is trained to tell them apart
content     language, quality, listed words, personal data, a function of yours
chain       the recipe's rules applied in turn, and what they took out, with examples
"""
