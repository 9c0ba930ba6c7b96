//! Element types of GGUF tensors and what their bytes mean.
//!
//! Quantised types come in blocks of 32 consecutive elements of a row. In the 4-bit types the low nibbles
//! of the 16 bytes are elements 0..16 and the high nibbles elements 16..32.

use half::{bf16, f16};

/// Elements of a quantised block.
const BLOCK: usize = 32;

/// The element types that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ElementType {
    F32,
    F16,
    Bf16,
    /// f16 scale d, 16 bytes: d (q - 8).
    Q4_0,
    /// f16 scale d, f16 minimum m, 16 bytes: d q + m.
    Q4_1,
    /// f16 scale d, 32 signed bytes: d q.
    Q8_0,
}

impl ElementType {
    /// What a user may read about the types.
    pub(super) const NAMES: &str = "F32 (0), F16 (1), BF16 (30), Q4_0 (2), Q4_1 (3) or Q8_0 (8)";

    pub(super) fn from_id(id: u32) -> Option<Self> {
        Some(match id {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            8 => Self::Q8_0,
            30 => Self::Bf16,
            _ => return None,
        })
    }

    /// Elements and bytes of one block.
    pub(super) fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q4_0 => (BLOCK, 2 + BLOCK / 2),
            Self::Q4_1 => (BLOCK, 4 + BLOCK / 2),
            Self::Q8_0 => (BLOCK, 2 + BLOCK),
        }
    }

    /// The values of whole blocks. All arithmetic is in f32, as in llama.cpp: a product of an 11-bit scale
    /// and a few-bit integer is exact, so only the sum of Q4_1 rounds.
    pub(super) fn dequantize(self, bytes: &[u8]) -> Vec<f32> {
        let (elements, size) = self.block();
        let mut values = Vec::with_capacity(bytes.len() / size * elements);
        for block in bytes.chunks_exact(size) {
            let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
            match self {
                Self::F32 => values.push(f32::from_le_bytes([block[0], block[1], block[2], block[3]])),
                Self::F16 => values.push(half(0)),
                Self::Bf16 => values.push(bf16::from_le_bytes([block[0], block[1]]).to_f32()),
                Self::Q4_0 => {
                    let d = half(0);
                    values.extend(nibbles(&block[2..]).map(|q| d * (f32::from(q) - 8.0)));
                }
                Self::Q4_1 => {
                    let (d, m) = (half(0), half(2));
                    values.extend(nibbles(&block[4..]).map(|q| d * f32::from(q) + m));
                }
                Self::Q8_0 => {
                    let d = half(0);
                    values.extend(block[2..].iter().map(|&q| d * f32::from(q.cast_signed())));
                }
            }
        }
        values
    }
}

fn nibbles(bytes: &[u8]) -> impl Iterator<Item = u8> {
    bytes.iter().map(|b| b & 15).chain(bytes.iter().map(|b| b >> 4))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*};

    /// 1.5 and -0.25 as f16, by hand: exponents 15 and 13, mantissas .5 and 0.
    const D: [u8; 2] = 0x3e00u16.to_le_bytes();
    const M: [u8; 2] = 0xb400u16.to_le_bytes();

    /// Bytes 0x10, 0x32, ... : low nibble 2i mod 16, high nibble 2i+1 mod 16.
    fn counting() -> Vec<u8> {
        (0..16u8).map(|i| ((2 * i) % 16) | (((2 * i + 1) % 16) << 4)).collect()
    }

    #[test]
    fn plain_types() {
        assert_eq!(ElementType::F32.dequantize(&[0, 0, 0x80, 0xbf, 0, 0, 0x28, 0x41]), [-1.0, 10.5]);
        assert_eq!(
            ElementType::F16.dequantize(&[0x00, 0x3e, 0x00, 0xb4, 0x01, 0x00]),
            [1.5, -0.25, 2f32.powi(-24)]
        );
        assert_eq!(ElementType::Bf16.dequantize(&[0xc0, 0x3f, 0x49, 0xc0]), [1.5, -3.140625]);
    }

    #[test]
    fn a_q4_0_block_by_hand() {
        let values = ElementType::Q4_0.dequantize(&[&D[..], &counting()].concat());
        assert_eq!(values.len(), 32);
        assert_eq!(values[..4], [-12.0, -9.0, -6.0, -3.0]); // 1.5 (0-8), 1.5 (2-8), ...
        assert_eq!(values[16..20], [-10.5, -7.5, -4.5, -1.5]); // 1.5 (1-8), 1.5 (3-8), ...
        assert_eq!(values[31], 10.5); // 1.5 (15-8)
    }

    #[test]
    fn a_q4_1_block_by_hand() {
        let values = ElementType::Q4_1.dequantize(&[&D[..], &M, &counting()].concat());
        assert_eq!(values.len(), 32);
        assert_eq!(values[..4], [-0.25, 2.75, 5.75, 8.75]); // 1.5 * 0 - 0.25, 1.5 * 2 - 0.25, ...
        assert_eq!(values[16..20], [1.25, 4.25, 7.25, 10.25]);
        assert_eq!(values[31], 22.25); // 1.5 * 15 - 0.25
    }

    #[test]
    fn a_q8_0_block_by_hand() {
        let quants: Vec<u8> = (0..32i8).map(|i| (i * 4 - 64).cast_unsigned()).collect();
        let values = ElementType::Q8_0.dequantize(&[&D[..], &quants, &M, &quants].concat());
        assert_eq!(values.len(), 64);
        assert_eq!(values[..3], [-96.0, -90.0, -84.0]); // 1.5 * -64, 1.5 * -60, ...
        assert_eq!(values[31], 90.0);
        assert_eq!(values[32..34], [16.0, 15.0]); // -0.25 * -64, ...
    }

    proptest! {
        /// Element by element from the formulas, each index worked out on its own.
        #[test]
        fn blocks_equal_a_naive_decoder(
            scale in any::<i16>(),
            minimum in any::<i16>(),
            bytes in vec(any::<u8>(), 32),
        ) {
            // Scales as a quantiser writes them: finite.
            let (d, m) = (f16::from_f32(f32::from(scale) / 64.0), f16::from_f32(f32::from(minimum) / 512.0));
            let (scale, minimum) = (d.to_le_bytes(), m.to_le_bytes());
            let q8 = ElementType::Q8_0.dequantize(&[&scale[..], &bytes].concat());
            let q4 = ElementType::Q4_1.dequantize(&[&scale[..], &minimum, &bytes[..16]].concat());
            let q4_0 = ElementType::Q4_0.dequantize(&[&scale[..], &bytes[..16]].concat());
            for i in 0..32 {
                let nibble = f64::from(if i < 16 { bytes[i] % 16 } else { bytes[i - 16] / 16 });
                let signed = f64::from(bytes[i]) - if bytes[i] > 127 { 256.0 } else { 0.0 };
                prop_assert_eq!(q8[i], (d.to_f64() * signed) as f32);
                prop_assert_eq!(q4_0[i], (d.to_f64() * (nibble - 8.0)) as f32);
                // One rounding of the exact sum, as f64 holds both terms exactly.
                prop_assert_eq!(q4[i], (d.to_f64() * nibble + m.to_f64()) as f32);
            }
        }
    }
}
