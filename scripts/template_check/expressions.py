"""Small template expressions: every filter, method, test and operator on values of every kind."""
import random

VALUES = ["'a b'", "''", "'ünï ß ŒX'", "\"it's 1\"", "' \\t x\\n '", "'a,b,,c'", "'line\\nbreak\\r\\nend'", "'x\\u2028y\\x1cz'",
          "'They\\'re o\\'clock'", "'42'", "' -7 '", "'0x1'", "1", "0", "-3", "2.5", "1.0", "true", "false", "none", "[]", "[1, 2, 3]", "['b', 'a', 'C']",
          "[none, 'x', 1.5, true]", "[[1], ['a', \"b'c\"]]", "{}", "{'z': 1, 'a': 'q'}", "{'items': 3, 'k': [1, {'n': none}]}", "(1, 2)", "('x',)",
          "undefined_name", "m.missing", "m", "m.content", "m['role']", "range(3)", "m.n"]
FILTERS = ["abs", "attr('role')", "batch(2) | list", "capitalize", "count", "default('D')", "default('D', true)", "dictsort", "first", "float",
           "format('a')", "groupby('a') | list", "indent(2)", "indent(2, true)", "int", "int(9)", "items | list", "join", "join(', ')", "last", "length",
           "list", "lower", "map('upper') | list", "map(attribute='a') | list", "max", "min", "pprint", "random", "reject('none') | list",
           "rejectattr('a') | list", "replace('a', 'b')", "replace('', '-')", "reverse | list", "round", "round(1)", "safe", "select('string') | list",
           "select | list", "selectattr('a', 'defined') | list", "slice(2) | list", "sort", "sort(reverse=true)", "string", "sum", "title", "tojson", "tojson(indent=2)",
           "tojson(ensure_ascii=true)", "tojson(sort_keys=true)", "trim", "trim('a ')", "truncate(3)", "unique | list", "upper", "urlencode", "wordcount",
           "xmlattr", "e", "center(6)", "striptags"]
METHODS = ["strip()", "strip(' a')", "lstrip()", "rstrip()", "rstrip('b\\n')", "split()", "split(',')", "split(',', 1)", "split(none, 1)", "split('x')[-1]", "rsplit(',', 1)",
           "rsplit()", "splitlines()", "splitlines(true)", "title()", "capitalize()", "upper()", "lower()", "swapcase()", "casefold()", "partition(',')",
           "rpartition(',')", "removeprefix('a')", "removesuffix('c')", "zfill(5)", "ljust(5, '.')", "rjust(5)", "center(6)", "index('a')", "rindex('a')", "find('b')",
           "find('a', 1)", "rfind('a')", "count('a')", "count(1)", "startswith('a')", "startswith(('a', 'x'))", "endswith('c')", "isdigit()", "isnumeric()", "isalpha()",
           "isalnum()", "isspace()", "isupper()", "islower()", "istitle()", "replace('a', 'bb')", "replace('a', 'b', 1)", "replace('', '-')", "join(['p', 'q'])", "join(m)",
           "format(1)", "items() | list", "keys() | list", "values() | list", "get('a')", "get('no', 5)", "copy()", "append(1)", "update({})", "pop()", "encode()", "expandtabs()"]
TESTS = ["defined", "undefined", "none", "not none", "string", "number", "integer", "float", "boolean", "true", "false", "mapping", "iterable", "sequence", "callable",
         "odd", "even", "divisibleby(2)", "lower", "upper", "in [1, 'a b']", "eq(1)", "equalto('42')", "ne(1)", "gt(1)", "lt(5)", "sameas(true)", "escaped"]
BINARY = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", ">=", "in", "not in", "and", "or"]
FIXED = [
    "{{ loop }}", "{% for c in 'héy' %}[{{ c }}]{% endfor %}", "{% for x in none %}x{% else %}e{% endfor %}", "{% for x in nope %}x{% else %}e{% endfor %}",
    "{% for k in {'b': 1, 'a': 2} %}{{ k }}{% endfor %}", "{% for k, v in {'b': 1, 'a': 2}.items() %}{{ k }}{{ v }}{{ loop.index }}{{ loop.last }}{% endfor %}",
    "{% for x in [1,2,3] if x != 2 %}{{ loop.index0 }}{{ x }}{{ loop.length }}{{ loop.revindex }}{% endfor %}",
    "{% for x in [1,1,2] %}{{ loop.changed(x) }}{{ loop.cycle('a','b') }}{{ loop.previtem }}{{ loop.nextitem }}{% endfor %}",
    "{% for x in [1,2,3,4] %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 4 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in [[1,[2]],[3]] recursive %}{% if x is iterable %}<{{ loop(x) }}>{% else %}{{ x }}{% endif %}{% endfor %}",
    "{% set ns = namespace(a=1) %}{% for i in range(3) %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}", "{% set ns = namespace({'a': 2}) %}{{ ns.a }}",
    "{% set x = 1 %}{% for i in [1] %}{% set x = 2 %}{% endfor %}{{ x }}", "{% set x %}a {{ 1 }} b{% endset %}{{ x }}|{{ x | length }}", "{% set a, b = 1, 2 %}{{ a }}{{ b }}",
    "{% macro f(a, b=2) %}{{ a }}-{{ b }}-{{ varargs }}-{{ kwargs }}{% endmacro %}{{ f(1) }}", "{% macro f(a, b=2) %}{{ a }}-{{ b }}{% endmacro %}{{ f(1) }}{{ f(b=3, a=0) }}{{ f() }}",
    "{% macro f() %}[{{ caller() }}]{% endmacro %}{% call f() %}in{% endcall %}", "{% macro f(x) %}  {{ x }}\n{% endmacro %}{{ f('q') | trim }}|{{ f('q') }}|",
    "{% filter upper %}abc {{ 'd' }}{% endfilter %}", "{% raw %}{{ x }}{% endraw %}", "{# c #}a{#- c -#} b", "a\n  {% if true %}  \n  b\n  {% endif %}\nc", "a\n  {%- if true +%}\n b {% endif -%}\n\n c\n",
    "a\n\n", "{{ 'x' }}\n", "{% if m %}\n\n{% endif %}\n\n", "  {{ 1 }}  \n  {% set a = 1 %}  \n x", "{%- set a = 1 -%}\n  {{- a -}}  \n", "{{ \"a\" 'b' }}", "{{ 1_000 }}{{ 1e3 }}{{ 1.5e-3 }}{{ 1e16 }}{{ 1e-7 }}",
    "{{ 'a' if false }}|{{ 'a' if true else 'b' }}", "{{ [1,2,3][1:] }}{{ [1,2,3][::-1] }}{{ 'héllo'[1:3] }}{{ 'abc'[-1] }}{{ 'abc'[::-1] }}{{ (1,2,3)[:-1] }}{{ [1,2,3][-5:2] }}", "{{ [1,2][5] }}|{{ {'a':1}['b'] }}|{{ 'abc'[9] }}",
    "{{ m.content.x }}|{{ m.role.content }}", "{{ nope.x }}", "{{ nope['x'] }}", "{{ nope() }}", "{{ m.items }}", "{{ m['items'] }}", "{{ {'items': 1}.items() | list }}", "{{ {'get': 1}.get('get') }}", "{{ {'a': 1} == {'a': 1.0} }}{{ [1] == [1] }}{{ 1 == true }}{{ 'a' == none }}",
    "{{ 'a' < 'b' }}{{ [1,2] < [1,3] }}", "{{ 'a' < 1 }}", "{{ none < 1 }}", "{{ nope < 1 }}", "{{ nope + 'a' }}", "{{ 'a' + nope }}", "{{ nope ~ 'a' }}{{ none ~ 1.0 ~ true ~ [1,'a'] }}", "{{ 'a' + 1 }}", "{{ 'a' + none }}", "{{ [1] + [2] }}{{ (1,) + (2,) }}", "{{ 'ab' * 2 }}{{ [1] * 2 }}",
    "{{ 7 // 2 }}{{ -7 // 2 }}{{ -7 % 3 }}{{ 7 / 2 }}{{ 8 / 2 }}{{ 2 ** 10 }}{{ 2 ** -1 }}{{ 7.0 // 2 }}{{ -2 ** 2 }}", "{{ '%s and %d' % ('a', 1) }}", "{{ '{} {x}'.format(1, x='y') }}", "{{ 'a %s' | format('b') }}", "{{ 1 if [] else 2 }}{{ 1 if '0' else 2 }}{{ 1 if 0.0 else 2 }}{{ 1 if {} else 2 }}",
    "{{ not none }}{{ not [] }}{{ not 'a' }}", "{{ 1 < 2 < 3 }}{{ 3 > 2 > 2 }}", "{{ 'a' in {'a': 1} }}{{ 1 in [1] }}{{ 'b' in 'abc' }}{{ none in [none] }}", "{{ 1 in 'a1' }}", "{{ 'a' in none }}", "{{ 'a' in nope }}", "{{ dict(a=1, b='c') }}", "{{ dict({'a': 1}, b=2) }}",
    "{{ joiner(', ')() }}", "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}", "{{ lipsum(1) }}", "{{ range(1, 10, 3) | list }}{{ range(5, 0, -2) | list }}{{ range(0) | list }}", "{{ range(3) }}", "{{ raise_exception('no ' ~ 1) }}", "{{ strftime_now('%d %b %Y') }}",
    "{% include 'x' %}", "{% do x %}", "{% with a = 1 %}{{ a }}{% endwith %}{{ a is defined }}", "{% autoescape true %}{{ '<' }}{% endautoescape %}", "{% block b %}x{% endblock %}", "{{ self }}", "{{ 'é' | upper }}{{ 'ß' | upper }}{{ 'İ' | lower }}{{ 'ΑΣ' | lower }}{{ 'ΑΣ'.lower() }}",
    "{{ {'a': [1.0, -0.0, none, true, \"q'\"], 1: 2} }}", "{{ ['\\u00a0', '\\u200b', '🙂', '\\x07', '\\n', 'é', '\\u0301'] }}", "{{ [nope] }}", "{{ m | tojson }}", "{{ {'é': '<&>\\u2028'} | tojson }}", "{{ 'a\\tb\\\\' | tojson }}", "{{ (1,) | tojson }}", "{{ nope | tojson }}",
    "{{ {1: 2, none: 3, true: 4} | tojson }}", "{{ [1, [2, {'a': []}]] | tojson(indent=4) }}", "{{ [1, 2] | tojson(separators=(',', ':')) }}", "{{ true is true }}{{ 1 is true }}{{ 1 is boolean }}{{ true is integer }}{{ true is number }}", "{{ '1' is number }}{{ m is mapping }}{{ m is sequence }}{{ nope is iterable }}{{ nope is sequence }}{{ none is sequence }}",
    "{{ 'b,a' | replace(',', ';') | upper ~ '!' }}", "{{ -1 | abs }}{{ (-1) | abs }}", "{{ 2.5 | round }}{{ 3.5 | round }}{{ 2.675 | round(2) }}{{ 7 | round }}", "{{ '3.7' | int }}{{ 'x' | int }}{{ 3.99 | int }}{{ '0b1' | int(0, 2) }}{{ '1e3' | float }}{{ 'x' | float }}", "{{ [3,1,2] | sort | first }}{{ ['b','A'] | sort }}{{ ['b','A'] | sort(case_sensitive=true) }}",
    "{{ [{'a': 2}, {'a': 1}] | sort(attribute='a') }}", "{{ [{'a': 2}, {'a': 1}] | map(attribute='a') | sum }}", "{{ [{'a': {'b': 1}}] | map(attribute='a.b') | list }}", "{{ [{'a': 1}, {}] | selectattr('a', 'equalto', 1) | list | length }}", "{{ [{'a': 1}, {'a': none}] | selectattr('a') | list }}", "{{ [1,2,3] | select('odd') | list }}{{ [1,2,3] | reject('gt', 1) | list }}",
    "{{ 'abc' | list }}{{ 'abc' | first }}{{ 'abc' | last }}{{ 'abc' | reverse }}{{ 'abc' | length }}", "{{ {'b': 1, 'a': 2} | list }}{{ {'b': 1, 'a': 2} | first }}{{ {'b': 1, 'a': 2} | length }}{{ {'b': 1, 'a': 2} | dictsort }}{{ {'b': 1} | items | list }}", "{{ [1,2,3] | join('-') }}{{ [1, none, 'a', 2.0] | join(',') }}{{ 'abc' | join('.') }}{{ {'a':1,'b':2} | join }}", "{{ m.content | default('x') }}{{ nope | default('y') }}{{ nope.z | default('w') }}{{ none | default('v') }}{{ '' | default('u', true) }}",
    "{{ 'a\nb' | indent }}|{{ 'a\n\nb' | indent(2, first=true) }}|{{ 'a\n\nb' | indent(2, blank=true) }}", "{{ 'hello world foo' | truncate(9) }}{{ 'hello' | wordcount }}", "{{ [1,2,3,4,5] | batch(2, 0) | list }}{{ [1,2,3,4,5] | slice(2) | list }}", "{{ ['a','A','b'] | unique | list }}", "{{ 'they\\'re a-ok (x)' | title }}{{ 'they\\'re a-ok (x)'.title() }}",
    "{% set x = m.content.split(' ') %}{{ x[0] }}{{ x[-1] }}{{ x | length }}", "{{ 'a</think>b'.split('</think>')[-1].lstrip('\\n') }}", "{{ '  a'.lstrip().rstrip('a') == '' }}", "{{ messages[0]['content'] }}{{ messages[-1].role }}{{ messages | length }}{{ messages[1:] | length }}", "{{ messages[::-1][0].role }}", "{{ (messages | last).role }}", "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('+') }}",
    "{% if messages[5] is defined %}y{% else %}n{% endif %}", "{{ messages[5].role }}", "{{ tools is none }}{{ tools is defined }}{{ documents }}{{ add_generation_prompt }}", "{{ bos_token }}{{ cls_token }}{{ eos_token is defined }}", "{% generation %}a{% endgeneration %}", "{% for i in [1,2] %}{%- generation -%} {{ i }} {%- endgeneration -%}\n{% endfor %}",
]


def expressions(seed, count):
    rng = random.Random(seed)
    made = [f"{{{{ {v} | {f} }}}}" for v in VALUES for f in FILTERS]
    made += [f"{{{{ ({v}).{m} }}}}" for v in VALUES for m in METHODS]
    made += [f"{{{{ {v} is {t} }}}}" for v in VALUES for t in TESTS]
    made += [f"{{{{ {a} {o} {b} }}}}" for a in VALUES for o in BINARY for b in VALUES]
    made += [f"{{% for x in {v} %}}<{{{{ x }}}}>{{% endfor %}}" for v in VALUES] + [f"{{{{ {v} }}}}|{{{{ {v} ~ '' }}}}" for v in VALUES]
    made = sorted(made)
    rng.shuffle(made)
    return FIXED + made[:count]
