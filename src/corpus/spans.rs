//! From trained spans of a text to the loss mask of its tokens.

use std::ops::Range;

use super::rules::Straddle;
use super::tokenizer::Encoded;

/// The loss mask of a text, and the tokens that could not be decided whole.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SpanMask {
    pub loss_mask: Vec<u8>, // (T), 0 or 1
    /// Tokens partly inside a span and partly outside, trained or not.
    pub straddlers: Vec<usize>,
}

/// A token is trained if the text it stands for lies wholly inside a span; with
/// [`Straddle::Include`], also if a part of it does. One that stands for
/// no text (a combining mark that a normaliser split off) goes with the character before it.
///
/// `offsets` (T) and `spans` are byte ranges of the same text; spans rise and don't overlap, and
/// those that touch count as one.
pub fn span_mask(
    offsets: &[(usize, usize)],
    spans: &[Range<usize>],
    straddle: Straddle,
) -> SpanMask {
    let spans = match straddle {
        Straddle::Exclude => joined(spans),
        // transformers 5 lets even an empty span train the token around it.
        Straddle::Include => spans.to_vec(),
    };
    let mut loss_mask = vec![0; offsets.len()];
    let mut straddlers = Vec::new();
    for (t, &(start, end)) in offsets.iter().enumerate() {
        // The first span that could hold the token, by the end of its text.
        let first = if start < end {
            spans.partition_point(|s| s.end <= start)
        } else {
            spans.partition_point(|s| s.end < start)
        };
        let Some(span) = spans.get(first) else {
            continue;
        };
        let inside = if start < end {
            span.start <= start && end <= span.end
        } else {
            span.start < start
        };
        if inside {
            loss_mask[t] = 1;
        } else if start < end && span.start < end {
            straddlers.push(t);
            loss_mask[t] = u8::from(straddle == Straddle::Include);
        }
    }
    SpanMask {
        loss_mask,
        straddlers,
    }
}

/// Every token.
pub fn all_trained(encoded: &Encoded) -> SpanMask {
    SpanMask {
        loss_mask: vec![1; encoded.ids.len()],
        straddlers: Vec::new(),
    }
}

fn joined(spans: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut joined: Vec<Range<usize>> = Vec::with_capacity(spans.len());
    for span in spans.iter().filter(|s| !s.is_empty()) {
        match joined.last_mut() {
            Some(last) if last.end >= span.start => last.end = last.end.max(span.end),
            _ => joined.push(span.clone()),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Byte by byte, straight from the words of the rule.
    fn oracle(offsets: &[(usize, usize)], spans: &[Range<usize>]) -> SpanMask {
        let trained = |byte: usize| spans.iter().any(|s| s.contains(&byte));
        let mut straddlers = Vec::new();
        let mut flag = |(t, &(start, end)): (usize, &(usize, usize))| {
            if start == end {
                return u8::from(start > 0 && trained(start - 1));
            }
            let inside = (start..end).filter(|&b| trained(b)).count();
            if 0 < inside && inside < end - start {
                straddlers.push(t);
            }
            u8::from(inside == end - start)
        };
        let loss_mask = offsets.iter().enumerate().map(&mut flag).collect();
        SpanMask {
            loss_mask,
            straddlers,
        }
    }

    fn edges(max: usize) -> impl Strategy<Value = Vec<usize>> {
        prop::collection::vec(0..max, 0..14).prop_map(|mut edges| {
            edges.sort_unstable();
            edges
        })
    }

    proptest! {
        #[test]
        fn the_mask_is_what_the_rule_says(
            spans in edges(40),
            tokens in prop::collection::vec((0_usize..40, 0_usize..6), 0..40),
        ) {
            let spans: Vec<_> = spans.chunks_exact(2).map(|e| e[0]..e[1]).collect();
            let offsets: Vec<_> = tokens.iter().map(|&(start, len)| (start, start + len)).collect();
            prop_assert_eq!(span_mask(&offsets, &spans, Straddle::Exclude), oracle(&offsets, &spans));
        }
    }

    #[test]
    fn straddlers_are_not_trained() {
        let found = span_mask(
            &[(0, 3), (3, 5), (5, 8), (8, 9)],
            std::slice::from_ref(&(4..8)),
            Straddle::Exclude,
        );
        assert_eq!(found.loss_mask, [0, 0, 1, 0]);
        assert_eq!(found.straddlers, [1]);
        let offsets = [(0, 3), (3, 5), (5, 8), (8, 9)];
        let found = span_mask(&offsets, std::slice::from_ref(&(4..8)), Straddle::Include);
        assert_eq!(found.loss_mask, [0, 1, 1, 0]);
        assert_eq!(found.straddlers, [1]);
    }

    #[test]
    fn touching_spans_are_one() {
        let found = span_mask(&[(0, 4)], &[0..2, 2..4], Straddle::Exclude);
        assert_eq!(found.loss_mask, [1]);
    }
}
