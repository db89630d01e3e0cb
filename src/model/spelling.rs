//! How a checkpoint spells the tensor names that a description uses.

use super::description::Description;

/// Prefixes of the description and what the checkpoint writes in their place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Spelling {
    prefixes: &'static [(&'static str, &'static str)],
    /// Prefixes, as stored, of the decoder's own tensors.
    decoders: Vec<String>,
}

impl Spelling {
    /// The description's spelling under which most of its tensors are there; the first of equals.
    pub fn choose(description: &Description, is_there: impl Fn(&str) -> bool) -> Spelling {
        let embedding = description.embedding.tensor.name.as_str();
        let head = description.head.weight.tensor.name.as_str();
        let body = description.body_weights();
        let names = body.iter().map(|spec| spec.tensor.name.as_str());
        let names: Vec<&str> = names.chain([embedding, head]).collect();
        let found = |prefixes: &[(&str, &str)]| {
            let stored = names
                .iter()
                .filter(|name| is_there(&respelled(prefixes, name)));
            stored.count()
        };
        let spellings = description.names.spellings.iter().copied();
        let best = spellings.reduce(|best, other| match found(other) > found(best) {
            true => other,
            false => best,
        });
        let prefixes = best.unwrap_or(&[]);
        let module = |name: &str| {
            let stored = respelled(prefixes, name);
            // What stands beside a module of two names down belongs to it.
            let mut parts: Vec<&str> = stored.split('.').collect();
            parts.truncate(parts.len().saturating_sub(2));
            parts.iter().map(|part| format!("{part}.")).collect()
        };
        let decoders = vec![module(embedding), head_module(&respelled(prefixes, head))];
        Spelling { prefixes, decoders }
    }

    /// The stored name.
    pub fn of(&self, name: &str) -> String {
        respelled(self.prefixes, name)
    }

    /// The description's name of what is stored.
    pub fn back(&self, stored: &str) -> String {
        for (ours, theirs) in self.prefixes {
            if let Some(rest) = stored.strip_prefix(theirs) {
                return format!("{ours}{rest}");
            }
        }
        stored.to_owned()
    }

    /// Whether a stored tensor belongs to the decoder, not to something beside it.
    pub fn is_decoders(&self, stored: &str) -> bool {
        self.decoders
            .iter()
            .any(|prefix| stored.starts_with(prefix.as_str()))
    }
}

fn head_module(stored: &str) -> String {
    stored.strip_suffix("weight").unwrap_or(stored).to_owned()
}

fn respelled(prefixes: &[(&str, &str)], name: &str) -> String {
    for (ours, theirs) in prefixes {
        if let Some(rest) = name.strip_prefix(ours) {
            return format!("{theirs}{rest}");
        }
    }
    name.to_owned()
}

/// Whether `name` is `pattern`, in which `{}` stands for a number.
pub fn matches(pattern: &str, name: &str) -> bool {
    let Some((before, after)) = pattern.split_once("{}") else {
        return match pattern.strip_suffix('*') {
            Some(start) => name.starts_with(start),
            None => pattern == name,
        };
    };
    let Some(rest) = name.strip_prefix(before) else {
        return false;
    };
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    digits > 0 && matches(after, &rest[digits..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_take_numbers_and_nothing_else() {
        assert!(matches("lm_head.weight", "lm_head.weight"));
        assert!(matches("a.{}.b", "a.12.b"));
        assert!(!matches("a.{}.b", "a..b"));
        assert!(!matches("a.{}.b", "a.1.2.b"));
        assert!(!matches("a.{}.b", "a.1.bb"));
        assert!(matches("a.{}.b.{}", "a.1.b.7"));
        assert!(matches("a.3.*", "a.3.b.c") && !matches("a.3.*", "a.31.b"));
    }

    #[test]
    fn the_first_prefix_is_respelled() {
        let prefixes = [
            ("model.", "language_model.model."),
            ("lm_head.", "language_model.lm_head."),
        ];
        assert_eq!(
            respelled(&prefixes, "model.norm.weight"),
            "language_model.model.norm.weight"
        );
        assert_eq!(
            respelled(&prefixes, "lm_head.weight"),
            "language_model.lm_head.weight"
        );
        assert_eq!(respelled(&[], "lm_head.weight"), "lm_head.weight");
    }
}
