-- KEYS[1] meta  [2] due  [3] ended  [4] buckets  [5] key logs
-- ARGV[1] owner  [2] token of this clear  [3] prefix of other keys  [4] step: 'first' or 'next'
--     [5] log to continue with, or ''  [6] offset in it
-- Runs one small step. The first step removes the checkpoint, so that the rest is not visible. The last step stores the token,
-- without which no batch is applied.
-- Returns 'DONE', 'FENCED', 'SUPERSEDED', or 'MORE' with the log and the offset to continue with.
local owner = redis.call('HGET', KEYS[1], 'owner')
if owner and owner ~= ARGV[1] then
  return {'FENCED'}
end
local prefix = ARGV[3]
if ARGV[4] == 'first' then
  redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3])
  redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'clearing', ARGV[2])
elseif redis.call('HGET', KEYS[1], 'clearing') ~= ARGV[2] then
  return {'SUPERSEDED'}
end

local buckets = redis.call('SPOP', KEYS[4], 1000)
if #buckets > 0 then
  for i, bucket in ipairs(buckets) do
    buckets[i] = prefix .. 'job:' .. bucket
  end
  redis.call('UNLINK', unpack(buckets))
  return {'MORE', '', '0'}
end

local log, start = ARGV[5], tonumber(ARGV[6])
if log == '' then
  log, start = redis.call('SRANDMEMBER', KEYS[5]), 0
end
if log then
  local key = prefix .. 'idemlog:' .. log
  local hashes = redis.call('GETRANGE', key, start, start + 16 * 1000 - 1)
  if hashes == '' then
    redis.call('UNLINK', key)
    redis.call('SREM', KEYS[5], log)
    return {'MORE', '', '0'}
  end
  local keys = {}
  for first = 1, #hashes, 16 do
    keys[#keys + 1] = prefix .. 'idem:' .. string.sub(hashes, first, first + 15)
  end
  redis.call('UNLINK', unpack(keys))
  return {'MORE', log, string.format('%.0f', start + #hashes)}
end

redis.call('HDEL', KEYS[1], 'clearing')
redis.call('HSET', KEYS[1], 'cleared', ARGV[2])
return {'DONE'}
