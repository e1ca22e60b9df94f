-- KEYS[1] meta  [2] flows  [3] sizes  [4] ended  [5] buckets  [6] recent  [7] evicted  [8] key logs
-- ARGV[1] token of this clear  [2] prefix of other keys  [3] step: 'first' or 'next'  [4] log to continue with, or ''
--     [5] offset in it
-- Runs one small step. The first step removes the checkpoint, so that the rest is not visible. The last step stores the token,
-- without which no batch is applied.
-- Returns 'DONE', 'SUPERSEDED', or 'MORE' with the log and the offset to continue with.
local prefix = ARGV[2]
if ARGV[3] == 'first' then
  redis.call('UNLINK', KEYS[1], KEYS[4], KEYS[6])
  redis.call('HSET', KEYS[1], 'owner', owner, 'installation', installation, 'topic', topic, 'seen', seconds(), 'clearing', ARGV[1])
elseif redis.call('HGET', KEYS[1], 'clearing') ~= ARGV[1] then
  return {'SUPERSEDED'}
end

local flows = redis.call('ZRANGE', KEYS[2], 0, 999)
if #flows == 0 and redis.call('EXISTS', KEYS[3]) == 1 then
  -- The set of flows was lost.
  local cursor = '0'
  repeat
    local page = redis.call('HSCAN', KEYS[3], cursor, 'COUNT', 1000)
    cursor = page[1]
    for i = 1, #page[2], 2 do
      flows[#flows + 1] = page[2][i]
    end
  until #flows > 0 or cursor == '0'
end
if #flows > 0 then
  redis.call('ZREM', KEYS[2], unpack(flows))
  redis.call('HDEL', KEYS[3], unpack(flows))
  for i, flow in ipairs(flows) do
    flows[i] = prefix .. 'due:' .. flow
  end
  redis.call('UNLINK', unpack(flows))
  return {'MORE', '', '0'}
end

local buckets = redis.call('SPOP', KEYS[5], 1000)
if #buckets > 0 then
  for i, bucket in ipairs(buckets) do
    buckets[i] = prefix .. 'job:' .. bucket
  end
  redis.call('UNLINK', unpack(buckets))
  return {'MORE', '', '0'}
end

local evicted = redis.call('ZRANGE', KEYS[7], 0, 999)
if #evicted > 0 then
  redis.call('ZREM', KEYS[7], unpack(evicted))
  for i, log in ipairs(evicted) do
    evicted[i] = prefix .. 'evicted:' .. log
  end
  redis.call('UNLINK', unpack(evicted))
  return {'MORE', '', '0'}
end

local log, start = ARGV[4], tonumber(ARGV[5])
if log == '' then
  log, start = redis.call('SRANDMEMBER', KEYS[8]), 0
end
if log then
  local key = prefix .. 'idemlog:' .. log
  local hashes = redis.call('GETRANGE', key, start, start + 16 * 1000 - 1)
  if hashes == '' then
    redis.call('UNLINK', key)
    redis.call('SREM', KEYS[8], log)
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
redis.call('HSET', KEYS[1], 'cleared', ARGV[1], 'format', format)
return {'DONE'}
